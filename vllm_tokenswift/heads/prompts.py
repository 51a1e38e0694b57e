"""Prompts for self-distillation: what a model is asked, so that it writes its own text.

Heads learn the habits of one model's text, so the prompts only need to reach all the
kinds of text it will be asked for: prose, lists, explanations, dialogue, code.
"""

from __future__ import annotations

import random

_TASKS = (
    "Write a long story about {}.",
    "Write a detailed essay about {}.",
    "Explain {} to a curious child, with many examples.",
    "Give a long numbered list of facts about {}.",
    "Write a dialogue between two friends who disagree about {}.",
    "Write a step-by-step guide to {}.",
    "Write a long letter to a newspaper about {}.",
    "Answer the ten most common questions about {}.",
    "Write the first chapter of a novel about {}.",
    "Describe the history of {} in detail.",
    "Compare two opposing views of {} at length.",
    "Write a speech about {}.",
    "Write a lesson plan with exercises about {}.",
    "Write a diary of a week in which {} changes everything.",
    "Write a Python program about {}, then explain it line by line.",
    "Write a long poem about {}.",
    "Make a table that compares things about {}, then comment on each row.",
    "Write a product review that is really about {}.",
    "Write a news report about {}.",
    "Write an encyclopedia article about {}.",
)

_SUBJECTS = (
    "a lighthouse keeper",
    "growing tomatoes",
    "the moon landing",
    "a lost dog",
    "learning to swim",
    "the water cycle",
    "a small library in the mountains",
    "baking bread",
    "the first railway",
    "a talking clock",
    "keeping bees",
    "prime numbers",
    "a journey across the desert",
    "saving money",
    "the roman empire",
    "an old violin",
    "training for a marathon",
    "how vaccines work",
    "a village without electricity",
    "sorting a list of numbers",
    "the invention of printing",
    "two sisters and a storm",
    "planning a garden",
    "electric cars",
    "a robot that wants to paint",
    "chess openings",
    "the deep sea",
    "a mysterious neighbour",
    "writing clear emails",
    "climate and weather",
    "a bank robbery that goes wrong",
    "cooking with little money",
    "the silk road",
    "a school on another planet",
    "fixing a bicycle",
    "democracy",
    "a winter in a cabin",
    "reading a text file and counting words",
    "the human heart",
    "an unexpected inheritance",
    "teaching a parrot to speak",
    "renewable energy",
    "a market in an old town",
    "sleep and dreams",
    "the life of a river",
    "a game of hide and seek",
    "starting a small business",
    "black holes",
    "a detective who hates puzzles",
    "packing for a long trip",
)


def built_in_prompts(seed: int) -> list[str]:
    """All pairs of a task and a subject (1,000 prompts), shuffled by ``seed``."""
    prompts = [task.format(subject) for task in _TASKS for subject in _SUBJECTS]
    random.Random(seed).shuffle(prompts)
    return prompts
