"""The canonical wording of an English sentence: many ways to ask one thing become one.

Each rule keeps the answer. They run in the order they stand here.
"""

from __future__ import annotations

import re

from headrace.caching.semantic.lexicon import Lexicon, stem

__all__ = ["canonical", "expand", "numbered", "singular"]

_SPECIAL = {
    "won't": "will not", "can't": "can not", "cannot": "can not", "shan't": "shall not",
    "let's": "let us", "y'all": "you all", "ain't": "is not", "gonna": "going to",
    "wanna": "want to", "gotta": "have to", "gimme": "give me", "lemme": "let me",
    "whats": "what is", "hows": "how is", "whos": "who is", "wheres": "where is",
    "whens": "when is", "whys": "why is", "thats": "that is", "theres": "there is",
    "dont": "do not", "doesnt": "does not", "didnt": "did not", "cant": "can not",
    "wont": "will not", "isnt": "is not", "arent": "are not", "wasnt": "was not",
    "werent": "were not", "havent": "have not", "hasnt": "has not", "couldnt": "could not",
    "shouldnt": "should not", "wouldnt": "would not", "im": "i am", "ive": "i have",
    "id": "id", "youre": "you are", "theyre": "they are", "u": "you", "ur": "your",
    "r": "r", "pls": "please", "plz": "please", "thx": "thanks", "w/o": "without",
}  # fmt: skip
_IS_AFTER = frozenset(
    "what who where when why how that there here it he she this everything".split()
)
_SUFFIX = {"'re": "are", "'m": "am", "'ll": "will", "'ve": "have", "'d": "would"}

_LEAD = re.compile(
    r"^(?:"
    r"(?:hi|hello|hey|greetings|good (?:morning|afternoon|evening|day)|dear)"
    r"(?: (?:there|all|everyone|everybody|guys|assistant|friend|friends|team|sir|madam))*\b"
    r"|(?:please|kindly|ok|okay|well|so|um|uh|hmm|yo|excuse me|sorry|just)\b"
    r"|(?:i (?:have|had|have got|got) )?(?:a )?(?:quick |simple |small )?question\b(?! mark)"
    r"|(?:can|could|would|will) (?:you|someone|somebody|anyone|anybody|people)(?: please| kindly)?"
    r" (?:tell|inform|teach|show|let) me(?: know)?(?= (?:what|who|whom|whose|when|where|why|how"
    r"|which|if|whether|about|the)\b)"
    r"|(?:can|could|would|will) (?:you|someone|somebody|anyone|anybody)(?: please| kindly)?"
    r"(?= (?:explain|describe|give|list|write|summarize|summarise|translate|show|create|generate"
    r"|suggest|recommend|compare|define|provide|name|make|help|convert|calculate|compute|draw"
    r"|tell|find|solve|prove|rewrite|outline|clarify)\b)"
    r"|(?:do|does|would) (?:you|anyone|anybody|someone|somebody)(?: here| happen to)* know"
    r"(?= (?:what|who|whom|when|where|why|how|which|if|whether)\b)"
    r"|(?:please )?(?:tell|show|teach) me(?= (?:what|who|when|where|why|how|which|about)\b)"
    r"|(?:please )?(?:explain|describe)(?: to me)?(?= (?:what|who|when|where|why|how|which)\b)"
    r"|let me know(?= (?:what|who|when|where|why|how|which|if|whether)\b)"
    r"|i (?:want|need|would like|would love|am trying|am looking|wish|like) to (?:know|find out|ask|see)"
    r"(?: you)?(?= (?:what|who|when|where|why|how|which|if|whether|about|the)\b)"
    r"|(?:i am|i was|am|was)? ?(?:curious|wondering|i wonder)(?: about| to know)?"
    r"(?= (?:what|who|when|where|why|how|which|if|whether)\b)"
    r"|any idea(?= (?:what|who|when|where|why|how)\b)"
    r"|if you (?:can|could|do not mind)\b|in your opinion|according to you"
    r") ?"
)
_TAIL = re.compile(
    r" (?:please|thanks(?: a lot| so much| in advance)?|thank you(?: so much| very much| in advance)?"
    r"|thx|kindly|in your opinion|according to you|for me please|guys|if you (?:can|could))$"
)
_ANYBODY = r"(?:i|you|we|one|people|a person|us)"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        # an embedded question back into its own order
        (r"^(what|who|where|when|how) ((?!is |are |was |were |do |does |did |can )[^|]+) (is|are|was|were)$", r"\1 \3 \2"),
        (r"^(?:if|whether) (.+?) (is|are|can|should|could|will|was|were) ", r"\2 \1 "),
        (r"^(?:what is|what are|how is|how are) (?:(?:the|a|some|any|your|most|very) )*(best|good|easiest|fastest|quickest|simplest|most effective|most efficient|proper|right|correct|possible)? ?(?:way|ways)(?: for " + _ANYBODY + r"| i can| one can| you can| we can)? (?:to|of|in which i can) ", r"howto \1 "),
        (r"^(?:is|are) there (?:a|an|any|some) (?:way|ways|method)(?: for " + _ANYBODY + r"| i can| you can| we can)? (?:to|of) ", "howto "),
        (r"^(?:which|what) is the best (?:way|method) (?:to|of|for) ", "howto best "),
        (r"^how (?:to best|best to|do i best|can i best) ", "howto best "),
        (r"^how to (?:go about )?", "howto "),
        (r"^(?:in what way|in which way|by what means) (?:do|can|could|should|would) " + _ANYBODY + " ", "howto "),
        (r"^how (?:do|does|can|could|should|would|might|may|shall) " + _ANYBODY + r" (?:go about |manage to |possibly |actually )?(?!feel\b|think\b|like\b|look\b|see\b|rate\b|work\b|define\b|know\b|say\b)", "howto "),
        (r"^how (?:do|can|could|would|should) (?:i|you|we|one) (know|say|see|define|look)\b", r"howto \1"),
        (r"^(?:steps|way|ways|method|guide|instructions|tips) (?:to|on how to|for how to) ", "howto "),
        (r"^(?:show|teach|tell|help) me (?:how )?to ", "howto "),
        # what somebody thinks of it
        (r"^what (?:do|would) (?:you|people|we) (?:think|feel|make) (?:about|of|regarding|on) ", "opinion on "),
        (r"^what (?:is|are) (?:your|people's|the) (?:personal )?(?:opinion|opinions|view|views|take|thought|thoughts|review|reviews|feeling|feelings) (?:on|of|about|regarding|towards|toward|over) ", "opinion on "),
        (r"^how (?:do|would) you (?:feel|think) (?:about|of) ", "opinion on "),
        # amounts
        (r"^what (?:is|would be) the (?:price|cost) of ", "cost of "),
        (r"^how much (?:do|does|did|would|will) (.+) cost$", r"cost of \1"),
        (r"^how much (?:time does it|time do you need|time is needed|time would it)(?: take)? to ", "how long to "),
        (r"^how long (?:do|does|will|would|might|should) it (?:usually |typically |normally )?take(?: for " + _ANYBODY + ")? to ", "how long to "),
        (r"^how much (?:do|does|will|would) it cost(?: for " + _ANYBODY + ")? to ", "cost to "),
        (r"^what (?:do|does|will|would) it cost(?: for " + _ANYBODY + ")? to ", "cost to "),
        (r"^(?:what is|tell) the (?:total )?(?:number) of (.+) in ", r"how many \1 in "),
        (r"^how (many|much|long|old|far|big|tall|often|deep|fast|high|heavy)\b", r"how\1"),
        (r"\b(\w+) are there in ", r"\1 in "),
        # meaning, difference, cause
        (r"^what (?:do|does|did) (?:the (?:word|term|phrase) )?(.+) (?:mean|stand for)$", r"meaning of \1"),
        (r"^(?:what is|what are|give|state|tell me)? ?(?:the )?(?:meaning|definition) of (?:the (?:word|term|phrase) )?", "meaning of "),
        (r"^define (?:the (?:word|term|phrase) )?", "meaning of "),
        (r"^how (?:do|does|is|are) (.+) (?:differ|different) from ", r"difference between \1 and "),
        (r"^(?:what is|what are|what|explain|tell me|list|state) (?:the )?(?:main |key |basic )?differences? (?:between|of) ", "difference between "),
        (r"^what (?:is|are|was) (?:the )?(?:main )?(?:reason|reasons|cause) (?:why|that) ", "why "),
        (r"^(?:for what reason|how come|why is it that|what makes it so that) ", "why "),
        (r"^(?:is it possible (?:for (?:me|us|you|someone|one|people|anyone) )?to|am i able to|are you able to|are we able to|can (?:i|we|one|someone|people|anyone)) ", "possible to "),
        (r"^(?:is there a possibility to|is it feasible to) ", "possible to "),
        (r"^(?:where|from where) (?:do|can|could|should|would|might|to) ?" + _ANYBODY + r"? (?=find|buy|get|purchase|see|learn|watch|download|read|eat|rent|go)", "where to "),
        (r"^(?:what should i do|what can i do|what do i do|what to do|what could i do) (?:to|in order to) ", "howto "),
        (r"^(?:which|what) (?:one )?(?=is |are |was |were )", "what "),
        (r"^(?:which|what) (?=[a-z]+ (?:is|are|was|were) )", "what "),
        (r"^(?:give me|list|tell me|name|can you name|suggest|recommend|what are|what is|what) (?:me )?(?:some of|some|a few|the|a list of|any)? ?(?:of the )?", "what "),
        (r"^(?:tell me about|tell me something about|explain|describe|talk about|tell about) ", "about "),
        (r"^i (?:am looking|look) for ", "what "),
        # turns of phrase
        (r"\bin order to\b", "to"), (r"\bdue to\b|\bowing to\b", "because of"),
        (r"\b(?:regarding|concerning|with regard to|with respect to)\b", "about"),
        (r"\bas well as\b", "and"), (r"\bsuch as\b", "like"), (r"\bget rid of\b", "remove"),
        (r"\ba lot of\b|\blots of\b|\bplenty of\b", "many"), (r"\bso many\b", "many"),
        (r"\bsomething called\b|\bso called\b", ""), (r"\b(?:have|has) to\b", "must"),
        (r"\beach other\b|\bone another\b", "eachother"), (r"\bat home\b", "athome"),
        (r"\bwould you (?:recommend|suggest)\b", "recommend"),
    )
)  # fmt: skip
_TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70,
         "eighty": 80, "ninety": 90}  # fmt: skip
_UNITS = {w: n for n, w in enumerate(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen".split())}  # fmt: skip
_ORDINALS = {w: f"{n}th" for n, w in enumerate(
    "second third fourth fifth sixth seventh eighth ninth tenth".split(), 2)}  # fmt: skip
_BE = {"is": "be", "are": "be", "am": "be", "does": "do", "has": "have", "an": "a"}


def expand(tokens: list[str]) -> list[str]:
    """Contractions written out, a possessive as its own token `'s`."""
    out: list[str] = []
    for n, token in enumerate(tokens):
        if token in _SPECIAL:
            out += _SPECIAL[token].split()
        elif token.endswith("n't"):
            out += [token[:-3], "not"]
        elif "'" not in token:
            out.append(token)
        elif token.endswith("'s"):
            base = token[:-2]
            out += [base, "is"] if base in _IS_AFTER else [base, "'s"]
        else:
            base, _, ending = token.rpartition("'")
            word = _SUFFIX.get("'" + ending)
            out += [base, word] if word and base else [p for p in token.split("'") if p]
        if n > 400:
            break
    return out


def canonical(tokens: list[str], words: Lexicon) -> list[str]:
    """Of one sentence, given its lower-case tokens."""
    text = " ".join(numbered(tokens))
    for phrase, word in words.phrases:
        if phrase in text:
            text = re.sub(rf"\b{re.escape(phrase)}\b", word, text)
    for _ in range(4):
        stripped = _TAIL.sub("", _LEAD.sub("", text, count=1), count=1).strip()
        if stripped == text or not stripped:
            break
        text = stripped
    for pattern, new in _RULES:
        text = " ".join(pattern.sub(new, text, count=1).split())
    filler = words.classes["filler"]
    out = [words.synonyms.get(token, token) for token in text.split() if token not in filler]
    return _sorted_pair(_of(out))


def singular(token: str, words: Lexicon) -> str:
    """A canonical word without its number and person."""
    token = _BE.get(token, token)
    if token in words.classes["time"] or token in words.classes["unit"]:
        return token if token in _KEEP_S else stem(token)
    token = stem(token)
    return words.synonyms.get(token, token)


_KEEP_S = frozenset({"ms", "ns", "us", "celsius"})


def numbered(tokens: list[str]) -> list[str]:
    """Number words as digits, thousands without separators."""
    out: list[str] = []
    tens: int | None = None
    for token in tokens:
        value = _UNITS.get(token)
        if tens is not None:
            if value is not None and 0 < value < 10:
                out[-1] = str(tens + value)
                tens = None
                continue
            tens = None
        if token in _TENS:
            tens = _TENS[token]
            out.append(str(tens))
        elif value is not None and token != "one":
            out.append(str(value))
        elif token in _ORDINALS and token != "second":
            out.append(_ORDINALS[token])
        elif re.fullmatch(r"\d{1,3}(?:,\d{3})+", token):
            out.append(token.replace(",", ""))
        else:
            out.append(token)
    return out


def _of(tokens: list[str]) -> list[str]:
    """ "france 's capital" at the end, or before a preposition, as "capital of france"."""
    if "'s" not in tokens:
        return tokens
    at = tokens.index("'s")
    owner, owned = tokens[at - 1 : at], tokens[at + 1 :]
    if not owner or not owned or len(owned) > 2:
        return tokens
    return [*tokens[: at - 1], *owned, "of", *owner]


def _sorted_pair(tokens: list[str]) -> list[str]:
    """Two that are compared, in alphabetical order: the difference between them has no direction."""
    if tokens[:2] == ["difference", "between"]:
        start, joins = 2, ("and",)
    elif tokens[:2] == ["what", "is"] and tokens[2:3] == ["better"]:
        start, joins = 3, ("or",)
    else:
        return tokens
    rest = tokens[start:]
    for join in joins:
        if rest.count(join) == 1:
            at = rest.index(join)
            left, right = sorted((rest[:at], rest[at + 1 :]))
            return [*tokens[:start], *left, join, *right]
    return tokens
