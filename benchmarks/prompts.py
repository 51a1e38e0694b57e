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
