"""Chat templates in the manner of the supported families."""

from __future__ import annotations

CHATML = """\
{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

TOOLS = """\
{%- macro call(tool_call) -%}
<tool_call>
{"name": {{ tool_call.function.name | tojson }}, "arguments": {
{%- for key, value in tool_call.function.arguments.items() -%}
{{ key | tojson }}: {{ value | tojson }}{{ ", " if not loop.last }}
{%- endfor -%}
}}
</tool_call>
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {%- if loop.index > 8 %}{% break %}{% endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.content %}
            {{- message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}{{ '\\n' + call(tool_call) }}{% endfor %}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' ~ message.role }}{% if message.name %} {{ message.name }}{% endif %}
        {{- '\\n' ~ message.content | trim }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
    {%- set ns.last = message.role %}
{%- endfor %}
{%- if add_generation_prompt and ns.last != 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}
        {{- raise_exception('only users and assistants speak here') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ message['content'] + eos_token }}
{%- endif %}
{%- endfor %}
"""
