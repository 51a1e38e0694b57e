"""The requests that TokenSwift knows, taken in and let go as vLLM's batch does."""

from __future__ import annotations

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.engine.drafted_trees import DraftedTrees
from vllm_tokenswift.engine.request_state import RequestState
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.partial_kv.table import DraftBlockTable, Mode
from vllm_tokenswift.sampling.request_parameters import RequestOptions


class RequestStates(dict[str, RequestState]):
    """By request id, what is kept of it between steps.

    Args:
        runner: whose batch and tree sampler the requests are in, too.
    """

    def __init__(self, runner: RunnerView) -> None:
        super().__init__()
        self._runner = runner
        self.drafted_trees = DraftedTrees(self)

    def start(self, req_id: str) -> None:
        """Takes in a request that the runner's batch has."""
        runner, options = self._runner, self._runner.options
        request = runner.requests[req_id]
        params = request.sampling_params
        prompt = request.prompt_token_ids
        runner.tree_sampler.add_request(
            req_id, params, prompt, request.output_token_ids, request.generator
        )
        sampled = params.temperature > 0
        draft = DraftState(
            options.ngram_n,
            options.ngram_k,
            options.suffix_max_match,
            sampled,
            sees_noise=runner.visible_noise(req_id) is not None,
        )
        draft.append_tokens(prompt)
        draft.append_tokens(request.output_token_ids)
        max_tokens = runner.max_model_len
        self[req_id] = RequestState(
            draft,
            draft_block_table(options, runner.tree_attention.block_size),
            speculate=RequestOptions.from_sampling_params(params, options).tokenswift,
            chain_only=params.structured_outputs is not None,
            max_tokens=min(max_tokens, len(prompt) + (params.max_tokens or max_tokens)),
        )
        if runner.recorder is not None:
            runner.recorder.start(req_id, [*prompt, *request.output_token_ids], sampled)

    def forget(self, req_id: str) -> None:
        """Lets go of a request, if it is known."""
        if self.pop(req_id, None) is not None:
            self._runner.tree_sampler.remove_request(req_id)
            self.drafted_trees.forget(req_id)
            if self._runner.recorder is not None:
                self._runner.recorder.finish(req_id)


def draft_block_table(options: TokenSwiftOptions, block_size: int) -> DraftBlockTable:
    """The draft block table of a new request; block_size: tokens of a KV block."""
    return DraftBlockTable(
        Mode(options.partial_kv),
        block_size,
        options.budget_tokens,
        options.sink_tokens,
        options.refresh_tokens,
    )
