"""The windowed penalty and eta-sampling without speculation: vLLM logits processors.

    LLM(model, logits_processors=[
        "vllm_tokenswift.sampling.processors:WindowedPenalty",
        "vllm_tokenswift.sampling.processors:EtaSampling",   # model runner V1 only
    ])

A request sets ``penalty_theta`` and ``penalty_window``, ``eta_epsilon`` and
``eta_alpha`` in its ``extra_args`` (``vllm_xargs``); the penalty's defaults stand
in ``additional_config["tokenswift"]``. The maths is the tree sampler's own, so equal
logits give bit-identical results with and without speculation.

vLLM has two model runners with a processor interface each, and the user does not
choose which one runs; :class:`WindowedPenalty` therefore satisfies both. Where the
penalty stands: V1 applies it before vLLM's own penalties, V2 after them.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from vllm_tokenswift.sampling.constraints import apply_eta
from vllm_tokenswift.sampling.penalty.batch_windows import BatchWindows
from vllm_tokenswift.sampling.penalty.slot_windows import SlotWindows
from vllm_tokenswift.sampling.request_parameters import PlainDefaults, RequestOptions


class WindowedPenalty(LogitsProcessorV1, LogitsProcessorV2):
    """The paper's contextual penalty, on either of vLLM's model runners.

    Runner V1 constructs it with a device and ``is_pin_memory`` and tells it of batch
    changes (``update_state``); V2 constructs it with the runner's request states and
    hands it requests by slot (``add_request``).

    Args:
        vllm_config: holds the penalty's defaults.
        device_or_states: of the logits on V1; the request states on V2.
        is_pin_memory: not used.

    Raises:
        ValueError: a default is not allowed.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device_or_states: torch.device | LogitsProcRequestState,
        is_pin_memory: bool = False,
    ) -> None:
        defaults = PlainDefaults.from_vllm_config(vllm_config)
        self._windows: BatchWindows | SlotWindows
        if isinstance(device_or_states, LogitsProcRequestState):
            self._windows = SlotWindows(defaults, device_or_states)
        else:
            self._windows = BatchWindows(defaults)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        RequestOptions.from_sampling_params(sampling_params, PlainDefaults())

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        assert isinstance(self._windows, BatchWindows)
        self._windows.update_batch(batch_update)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        assert isinstance(self._windows, SlotWindows)
        return self._windows.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        assert isinstance(self._windows, SlotWindows)
        self._windows.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        if isinstance(self._windows, SlotWindows):
            assert ctx is not None
            self._windows.penalise(logits, ctx)
        else:
            self._windows.penalise(logits)
        return logits


class EtaSampling(LogitsProcessorV1):
    """Eta-sampling on model runner V1: after temperature and min-p, before top-k.

    Runner V2 offers custom processors no place after the temperature, so there is
    no such class for it; V2 refuses this one by name when it starts.

    Args:
        vllm_config: not used.
        device: of the logits.
        is_pin_memory: not used.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._requests: dict[int, tuple[float, float]] = {}  # batch row -> epsilon, alpha

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        RequestOptions.from_sampling_params(sampling_params, PlainDefaults())

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, self._new_request)

    @staticmethod
    def _new_request(
        params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> tuple[float, float] | None:
        options = RequestOptions.from_sampling_params(params, PlainDefaults())
        if options.eta_epsilon is None or options.eta_alpha is None:
            return None
        return options.eta_epsilon, options.eta_alpha

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._requests:
            rows = [self._requests.get(row, (0.0, 0.0)) for row in range(len(logits))]
            table = torch.tensor(rows, dtype=torch.float32).to(self._device)  # [rows, 2]
            apply_eta(logits, table[:, :1], table[:, 1:])
        return logits
