"""Questions that are near to one another and want different answers, and some that want the same.

Each line of a block is a set of questions no two of which have one answer.
"""

from __future__ import annotations

from itertools import combinations

__all__ = ["REWORDED", "TRAPS"]

_TRAPS = {
    "numbers": """
        What is 17 times 23? | What is 17 times 24? | What is 18 times 23?
        How do I convert 5 miles to kilometers? | How do I convert 50 miles to kilometers?
        List 3 reasons to learn Rust | List 5 reasons to learn Rust | List 10 reasons to learn Rust
        What is the population of a town of 1,000? | What is the population of a town of 10,000?
        How do I cook two eggs? | How do I cook twelve eggs? | How do I cook twenty two eggs?
        Is 0.5 greater than 0.45? | Is 0.5 greater than 0.55?
        What is the square root of 144? | What is the square root of 169?
        Can I retire at 55? | Can I retire at 65?
    """,
    "units and amounts": """
        Is 50 mg of aspirin safe? | Is 500 mg of aspirin safe? | Is 50 g of aspirin safe?
        How fast is 100 km/h? | How fast is 100 mph?
        How hot is 30 celsius? | How hot is 30 fahrenheit?
        Is 5 dollars a lot for coffee? | Is 5 euros a lot for coffee? | Is 5 pounds a lot for coffee?
        How much is $20 worth? | How much is €20 worth?
        Is 10 GB enough for a phone? | Is 10 MB enough for a phone? | Is 10 TB enough for a phone?
        How long is a meter? | How long is a kilometer? | How long is a foot?
        What is 10% of 50? | What is 10 of 50?
    """,
    "dates and versions": """
        Who won the world cup in 2018? | Who won the world cup in 2022?
        What happened on 4 July 1776? | What happened on 14 July 1776? | What happened on 4 June 1776?
        What is new in Python 3.11? | What is new in Python 3.12? | What is new in Python 3.1?
        What is the weather in Rome in May? | What is the weather in Rome in March?
        Are shops open on Monday? | Are shops open on Sunday?
        What is special about version 2.0.1? | What is special about version 2.1.0?
        What were the 1980s like? | What were the 1990s like?
        How do I meet at 7 am? | How do I meet at 7 pm?
    """,
    "negation": """
        Should I take vitamins? | Should I not take vitamins?
        Is it safe to eat raw eggs? | Is it not safe to eat raw eggs? | Is it unsafe to eat raw eggs?
        Why do people like jazz? | Why don't people like jazz?
        Which foods contain gluten? | Which foods don't contain gluten?
        How do I sleep with a light on? | How do I sleep without a light on?
        Can dogs eat chocolate? | Can't dogs eat chocolate?
        Why is my code working? | Why isn't my code working?
        What should I do before an exam? | What should I never do before an exam?
        Who can vote? | Who cannot vote?
        How do I stop a process? | How do I start a process?
        How do I avoid failing a test? | How do I keep failing a test?
    """,
    "antonyms": """
        How do I turn dark mode on? | How do I turn dark mode off?
        How do I enable notifications? | How do I disable notifications?
        How do I increase the volume? | How do I decrease the volume?
        What are the advantages of nuclear power? | What are the disadvantages of nuclear power?
        How do I open an account? | How do I close an account?
        How do I lose weight? | How do I gain weight?
        Why are prices rising? | Why are prices falling?
        How do I lock the door? | How do I unlock the door?
        What is the maximum speed? | What is the minimum speed?
        How do I install the driver? | How do I uninstall the driver?
        What are good habits? | What are bad habits?
        How do I log in? | How do I log out?
        How do I encrypt a file? | How do I decrypt a file?
        What are the symptoms of a low fever? | What are the symptoms of a high fever?
        How do I buy shares? | How do I sell shares?
        Is the left side better? | Is the right side better?
        How do I follow somebody? | How do I unfollow somebody?
        What is legal in Spain? | What is illegal in Spain?
    """,
    "order and direction": """
        How do I fly from Paris to London? | How do I fly from London to Paris?
        Translate from French to German | Translate from German to French
        Can a lion beat a tiger? | Can a tiger beat a lion?
        How do I convert a list to a string? | How do I convert a string to a list?
        Does smoking cause stress? | Does stress cause smoking?
        Is the moon bigger than the earth? | Is the earth bigger than the moon?
        Did the man bite the dog? | Did the dog bite the man?
        How do I import data into Excel? | How do I export data from Excel?
        What is A minus B? | What is B minus A?
        Why do cats chase mice? | Why do mice chase cats?
        How do I move a file to a folder? | How do I move a folder to a file?
        Should I upgrade to Windows from Linux? | Should I upgrade from Windows to Linux?
        Is it before the war? | Is it after the war?
        What is above the clouds? | What is below the clouds?
        Who was king before Henry? | Who was king after Henry?
    """,
    "names and rare words": """
        What is the capital of Australia? | What is the capital of Austria?
        Who founded Apple? | Who founded Amazon? | Who founded Alphabet?
        What is the population of Iran? | What is the population of Iraq?
        Where is Georgia? | Where is Armenia?
        Who was Niels Bohr? | Who was Harald Bohr?
        How do I cook basmati? | How do I cook jasmine?
        What is ibuprofen for? | What is paracetamol for?
        What is TCP? | What is UDP?
        Do I need a visa for china? | Do I need a visa for russia?
        What does mitosis mean? | What does meiosis mean?
        What is a print? | What is a printer?
        What is a lock? | What is a locker?
        How do I find a job in teaching? | How do I find a job as a teacher?
        What is a state? | What is a statement?
        What is an engine? | What is an engineer?
        Is a Tesla expensive? | Is a Toyota expensive?
        What is the plot of Hamlet? | What is the plot of Macbeth?
        How big is Mars? | How big is Venus?
        What is hyperglycemia? | What is hypoglycemia?
        How do I call steve? | How do I call kevin?
    """,
    "kind of question": """
        Who is the mayor of Berlin? | Where is the mayor of Berlin?
        When was Rome founded? | Why was Rome founded? | Who founded Rome?
        How many moons does Saturn have? | Which moons does Saturn have?
        How long is the Nile? | Where is the Nile? | How old is the Nile?
        What is a mortgage? | How do I get a mortgage? | Should I get a mortgage?
        Is Python fast? | Why is Python fast? | How fast is Python?
        What causes rain? | Does it rain? | When does it rain?
    """,
    "language": """
        Wie alt ist Berlin? | Wie alt ist Bremen?
        Quelle est la capitale de la France ? | Quelle est la capitale de la Chine ?
        ¿Cuántos años tiene Madrid? | ¿Cuántos años tiene México?
        Say hello in French | Say hello in Spanish | Say hello in Swedish
        How do you say cat in Japanese? | How do you say cat in Korean?
        Какая столица России? | Какая столица Китая?
        東京の人口は？ | 大阪の人口は？
        Kann ich Eier essen? | Kann ich keine Eier essen?
    """,
    "form of the answer": """
        Explain recursion in one sentence | Explain recursion in one paragraph
        Summarize the French Revolution in JSON | Summarize the French Revolution in YAML
        Explain gravity | Explain gravity briefly | Explain gravity in detail
        Write a poem about rain | Write a story about rain | Write an essay about rain
        Write a function in Python that sorts | Write a function in Java that sorts
        Give me a short answer on taxes | Give me a long answer on taxes
        List the planets as a table | List the planets as bullet points
        Explain photosynthesis simply | Explain photosynthesis formally
        Describe the sea in 50 words | Describe the sea in 500 words
        Explain it to a child of five | Explain it to a professor of physics
    """,
    "quotations and code": """
        What does "break the ice" mean? | What does "break the bank" mean?
        What does `git pull` do? | What does `git push` do?
        Why is foo() slow? | Why is bar() slow?
        What is at https://a.example/x? | What is at https://a.example/y?
        What does ls -l do? | What does ls -a do?
        Translate 'good morning' | Translate 'good evening'
        What does user_id mean? | What does user_name mean?
        What is in /etc/hosts? | What is in /etc/passwd?
        How do I write a == b? | How do I write a != b?
        Who is bob@example.com? | Who is eve@example.com?
    """,
    "superlatives and quantities": """
        What is the best phone? | What is the worst phone? | What is the cheapest phone?
        What is the largest lake? | What is the deepest lake? | What is the smallest lake?
        Which birds can fly? | Which birds can fly the highest?
        Do all cats purr? | Do some cats purr? | Do most cats purr? | Do no cats purr?
        How do I eat more protein? | How do I eat less protein? | How do I eat only protein?
        Are both twins tall? | Is either twin tall?
        Is it always cold in Oslo? | Is it never cold in Oslo? | Is it sometimes cold in Oslo?
        What is the first law of motion? | What is the second law of motion?
        Who came first? | Who came last?
    """,
    "modality, time and person": """
        Can I park here? | Must I park here? | Should I park here?
        Will the dollar rise? | Did the dollar rise? | Would the dollar rise?
        Was the exam hard? | Is the exam hard? | Will the exam be hard?
        How do I help her? | How do I help him? | How do I help them?
        Does my boss like me? | Does your boss like you?
        Who was the president? | Who is the president? | Who will be the president?
        Is he my friend? | Is she my friend?
        How did they win? | How do they win?
    """,
    "what is joined": """
        Can I drink milk and coffee? | Can I drink milk or coffee?
        What if it rains and snows? | What if it rains or snows?
        Is it hot because it is summer? | Is it hot although it is summer?
        How do I pay with cash? | How do I pay with cash and card?
        How do I cook rice? | How do I cook rice and beans?
        What are the side effects of tea? | What are the effects of tea?
        How do I apply for an international visa? | How do I apply for a visa card?
        How do I travel? | How do I travel with a dog?
        What is virgin olive oil? | What is olive oil?
    """,
    "now, here and mine": """
        What is the latest news? | What is the latest news
        What is the time now? | what is the time now
        What is my account balance? | What's my account balance?
        What is the weather today? | What's the weather today?
        What happened this week? | What has happened this week?
        Do I have any appointments? | Have I any appointments?
        Why is that? | Why's that?
        What does this symbol mean? | what does this symbol mean
        Can you solve this problem? | Could you solve this problem?
        What is the output of the following program? | What is the output of the following programs?
        How do I install it? | How can I install it?
        And then? | and then
        Who is the current champion? | Who's the current champion?
        What did you say above? | What have you said above?
    """,
}
_REWORDED = """
    What is the capital of France? | what is the capital of france | What's the capital of France?
    How do I learn Python? | How can I learn Python? | How to learn Python
    How do I boil an egg? | Please tell me how to boil an egg | Can you tell me how to boil an egg?
    What is photosynthesis? | Could you please explain what photosynthesis is?
    How do I make bread at home? | What is the way to make bread at home?
    Is it possible to learn chess in a week? | Can I learn chess in a week?
    What is the meaning of irony? | What does irony mean? | Define irony
    What is the difference between a virus and a bacterium? | How does a virus differ from a bacterium?
    How do I remove a stain from a carpet? | How do I get rid of a stain from a carpet?
    Why don't penguins fly? | Why do penguins not fly?
    I would like to know how volcanoes form | How do volcanoes form?
    Hi, how do I change a tire? | How do I change a tire? Thanks! | how do i change a tire pls
    What color is the sky? | What colour is the sky?
    How long does it take to fly to the moon? | How long will it take to fly to the moon?
    What is the price of a house in Spain? | What is the cost of a house in Spain?
    How many legs does a spider have? | how many legs does a spider have ?
    Tell me the history of the violin | Please tell me the history of the violin
    What's artificial intelligence? | What is AI?
    How do I write a cover letter? | how would i write a cover letter
    Do you know who wrote Don Quixote? | Who wrote Don Quixote?
    How do I buy a used car? | How do I purchase a used car?
    Is there a way to save water? | How can I save water?
    What are the symptoms of flu? | What are the symptoms of the flu?
    I'm wondering why the sea is salty | Why is the sea salty?
    How does a battery work? | Can you explain how a battery works?
    What is twenty plus three? | What is 20 plus 3?
    How can one grow tomatoes? | How can I grow tomatoes? | How do you grow tomatoes?
    Where can I buy fresh fish? | Where do I buy fresh fish?
    Explain black holes, please | Please explain black holes
    What is the fastest way to peel garlic? | what's the fastest way to peel garlic?
    How do planes fly? | How do airplanes fly?
    Do cats dream? | do cats dream?? | DO CATS DREAM
    Can you recommend a book on gardening? | Could you recommend a book on gardening?
    Who was the first woman in space? | who was the first woman in space
    What is e-mail? | What is email?
    How do I center a div in CSS? | How can I center a div in CSS?
    What's the best way to clean a window? | What is the best way to clean windows?
    Why is the grass green? | Why is grass green?
    How do I tie a tie? | Show me how to tie a tie
    Is coffee healthy? | Is coffee really healthy?
"""


def _sets(block: str) -> list[list[str]]:
    lines = (line.strip() for line in block.splitlines())
    return [[part.strip() for part in line.split(" | ")] for line in lines if line]


TRAPS = [
    (kind, a, b)
    for kind, block in _TRAPS.items()
    for questions in _sets(block)
    for a, b in combinations(questions, 2)
]
REWORDED = [(a, b) for questions in _sets(_REWORDED) for a, b in combinations(questions, 2)]
