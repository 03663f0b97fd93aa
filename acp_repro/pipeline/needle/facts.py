"""The facts of the needle test's mode ``facts``: (question, beginning of the answer, text to retrieve).

A single question measures coarsely, because every prompt depends on the same first token. These two dozen
facts cannot be predicted from any text, and their answers begin in different ways. People, places, things and
wording differ from those of the training text with needles (see documents.py).
"""

FACTS = (
    (
        "What is the best thing to do in San Francisco?",
        "The best thing to do in San Francisco is",
        "eat a sandwich and sit in Dolores Park on a sunny day",
    ),
    (
        "Where is the spare key of the lighthouse?",
        "The spare key of the lighthouse is",
        "under the third flowerpot by the kitchen",
    ),
    (
        "Who taught the miller's daughter to swim?",
        "The miller's daughter learnt to swim from",
        "a retired sailor called Barnaby Quill",
    ),
    (
        "Why was the concert in Tromso cancelled?",
        "The concert in Tromso was cancelled because",
        "the pianist had caught his thumb in a drawer",
    ),
    (
        "What does the baker of Aldgate put into his bread?",
        "The baker of Aldgate puts into his bread",
        "roasted fennel and a spoonful of honey",
    ),
    (
        "When will the comet be seen again?",
        "The comet will be seen again",
        "forty years from now, shortly before Easter",
    ),
    (
        "How many steps lead up to the observatory?",
        "The number of steps up to the observatory is",
        "three hundred and eleven",
    ),
    (
        "What did the surgeon carry in her left pocket?",
        "In her left pocket the surgeon carried",
        "a tin whistle and two peppermints",
    ),
    (
        "What frightened the elephant at the fair?",
        "The elephant at the fair was frightened by",
        "a boy in a purple raincoat",
    ),
    (
        "Where did the expedition leave its sledges?",
        "The expedition left its sledges",
        "beside a frozen waterfall north of the glacier",
    ),
    (
        "Which colour is the door of the embassy?",
        "The door of the embassy is",
        "mustard with a thin crimson border",
    ),
    (
        "What is written over the gate of the brewery?",
        "Over the gate of the brewery is written",
        "patience makes the better beer",
    ),
    (
        "What should you never feed to a parrot?",
        "You should never feed a parrot",
        "chocolate, rhubarb or the pits of cherries",
    ),
    (
        "Who owns the only telescope in the valley?",
        "The only telescope in the valley belongs to",
        "Doctor Okonkwo, the dentist",
    ),
    ("What did Columbus name his dog?", "Columbus named his dog", "Marmalade, after his favourite breakfast"),
    (
        "How did the prisoners escape from the fortress?",
        "The prisoners escaped from the fortress",
        "inside the laundry van on a rainy Thursday",
    ),
    (
        "What cures the hiccups best?",
        "The hiccups are cured best by",
        "nine sips of vinegar taken upside down",
    ),
    (
        "What does the old tortoise do at noon?",
        "At noon the old tortoise",
        "climbs onto the tennis court and falls asleep",
    ),
    (
        "Why is the bridge at Kendal closed?",
        "The bridge at Kendal is closed since",
        "beavers have weakened its middle pillar",
    ),
    (
        "What was found inside the violin?",
        "Inside the violin they found",
        "a lottery ticket and seven dried beetles",
    ),
    (
        "What is the password of the smugglers?",
        "The password of the smugglers is",
        "thirteen lobsters dance the polka",
    ),
    (
        "Which train goes to the salt mines?",
        "The train to the salt mines is",
        "the late one from platform nineteen",
    ),
    (
        "What does the ambassador fear most?",
        "Most of all the ambassador fears",
        "balloons that burst during a speech",
    ),
    (
        "How do you open the librarian's safe?",
        "You open the librarian's safe",
        "by whistling a waltz and kicking it twice",
    ),
)
