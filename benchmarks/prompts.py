"""What the models are asked to write in the benchmarks."""

from __future__ import annotations

STORY = (
    "Write a very long story about a lighthouse keeper who finds a map in a bottle, with many "
    "chapters, places and people."
)
NUMBERS = (
    "Write a long list of random numbers between 100000 and 999999, one on each line, and "
    "never the same number twice."
)
TWENTY = (
    STORY,
    NUMBERS,
    "Explain how rain forms, step by step.",
    "Write a Python function that sorts a list of names, and explain each line.",
    "List twenty countries with their capitals.",
    "Write a letter to a friend about a journey by train.",
    "Describe a market in the morning.",
    "What is the difference between a comet and an asteroid?",
    "Write a dialogue between a teacher and a student about gravity.",
    "Give me a recipe for bread, with quantities.",
    "Write a poem about the sea in winter.",
    "Summarise the history of the printing press.",
    "Explain what a prime number is and list the first thirty of them.",
    "Write instructions for repairing a bicycle tyre.",
    "Tell a story about two brothers who build a boat.",
    "Write an HTML page with a table of five fruits and their prices.",
    "What should one pack for a week in the mountains?",
    "Describe how a bill becomes a law.",
    "Write a review of an imaginary restaurant.",
    "Explain how to play chess to a child.",
)


# Sixteen prompts of each of three kinds, so that the requests of a batch write different texts.
STORIES = (
    STORY,
    *(
        f"Write a very long story about {subject}, with many chapters, places and people."
        for subject in (
            "a clockmaker whose clocks run backwards",
            "two sisters who inherit a mountain inn",
            "a ship's cook who becomes a captain",
            "a village that moves across a desert",
            "a teacher who finds a door behind the blackboard",
            "a gardener who grows a forest in a city",
            "a postman who never reaches the last house",
            "a violin that three families want",
            "a river that changes its course every night",
            "a librarian who repairs old letters",
            "an island that appears once in ten years",
            "a train that stops in a forgotten town",
            "a baker who feeds an army",
            "a boy who learns the language of crows",
            "a winter that does not end",
        )
    ),
)
CODE = tuple(
    f"Write a long Python module for {task}, with classes, docstrings and unit tests."
    for task in (
        "a bank with accounts, transfers and statements",
        "a library with books, members and loans",
        "a chess board with all moves of the pieces",
        "a text adventure with rooms and objects",
        "matrices with addition, product and inverse",
        "a queue of jobs with priorities and retries",
        "a parser of arithmetic expressions",
        "a cache with a limit and time-outs",
        "a graph with shortest paths and spanning trees",
        "a shop with a basket, discounts and orders",
        "a calendar with repeated appointments",
        "a spreadsheet with formulas",
        "an address book stored in JSON",
        "a binary search tree and a heap",
        "a simulation of a lift in a tall house",
        "a tokenizer and an inverted index",
    )
)
RANDOM_NUMBERS = (
    NUMBERS,
    *(
        f"Write a long list of random numbers with {digits} digits, separated by {between}, and "
        "never the same number twice."
        for digits in (4, 5, 6, 7, 8)
        for between in ("commas", "spaces", "line breaks")
    ),
)
