"""TokenSwift for vLLM: lossless self-speculative decoding of very long outputs.

Importing this package imports neither vLLM nor torch. vLLM reaches it through the
entry point ``vllm.general_plugins`` (:mod:`vllm_tokenswift.plugin`).
"""

__version__ = "0.1.0"
