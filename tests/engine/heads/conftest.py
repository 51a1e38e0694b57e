"""Small targets and heads, for all tests of heads."""

from small_targets import random_heads, small_target, target_folder

__all__ = ["random_heads", "small_target", "target_folder"]
