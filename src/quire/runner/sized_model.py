"""The second life of a worker: a loaded model with its KV cache, batch state and program."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import QuireError
from quire.plan import KVGroup
from quire.runner.hooks import Hook
from quire.runner.hooks.acceptance import Acceptance
from quire.runner.hooks.logprobs import SampledLogprobs
from quire.runner.hooks.penalties import Penalties
from quire.runner.hooks.prompt_logprobs import PromptLogprobs
from quire.runner.hooks.sampling import Sampling
from quire.runner.kv_cache import KVCache
from quire.runner.loaded_model import LoadedModel
from quire.runner.program import ModelLanes, StepProgram
from quire.runner.state import BatchState, ColumnSpec
from quire.runner.transfer.places import KVTransfer, open_places

_RARE_HOOKS: dict[str, type[Hook]] = {
    "logprobs": SampledLogprobs,
    "prompt_logprobs": PromptLogprobs,
}
"""Hooks that few requests need, by the parameter that asks for them. Where programs are captured
they take part from the start; elsewhere the first request that asks adds one."""


class SizedModel:
    """The memory of a worker, and the program that runs over it.

    Attributes:
        loaded: the models.
        num_blocks: blocks of each KV group.
        cache: the KV cache.
        state: the batch state: per-lane columns and a step's inputs.
        features: the hooks of features, in order.
        hooks: all hooks, in the order in which they take part.
        program: the bodies and heads.
        transfer: moves blocks to places outside of the device; None where there are none.
    """

    state: BatchState
    hooks: tuple[Hook, ...]
    program: StepProgram

    def __init__(
        self, loaded: LoadedModel, num_blocks: tuple[int, ...], features: Sequence[Hook]
    ) -> None:
        self.loaded = loaded
        self.num_blocks = num_blocks
        self.features = tuple(features)
        self.cache = KVCache(
            loaded.groups,
            num_blocks,
            layouts=[layout for model in loaded.models for layout in model.kv_layouts],
            kv_format=loaded.kv_format,
            device=loaded.device,
            head_scales=loaded.head_scales(),
        )
        self.transfer: KVTransfer | None = None
        args = loaded.config.args
        if args.host_cache_gb or args.kv_peers is not None:
            self.transfer = open_places(loaded.config, self.cache, loaded.models, loaded.group)
        self.rare = list(_RARE_HOOKS)
        """Parameters whose hooks do not take part yet."""
        self._prepare(loaded.groups)

    def _prepare(self, groups: Sequence[KVGroup]) -> None:
        """Makes the batch state, and the program over it."""
        config = self.loaded.config
        penalties = Penalties(config.vocab_size)
        acceptance = Acceptance(config.eos_token_ids, penalties)
        self._take_hooks((penalties, *self.features, Sampling(), acceptance), groups, self.rare)
        for hook in self.features:
            hook.take_cache(self.cache)
        self._make_program(len(self.loaded.model.kv_layouts), acceptance)

    def _take_hooks(
        self, hooks: tuple[Hook, ...], groups: Sequence[KVGroup], rare: Sequence[str] = ()
    ) -> None:
        """Makes a batch state with the columns of these hooks."""
        limits = self.loaded.limits
        self.hooks = hooks
        columns = [column for hook in hooks for column in hook.columns(limits)]
        columns += [ColumnSpec(f"num_{name}", fill=-1) for name in rare]
        self.state = BatchState(limits, groups, self.loaded.device, columns)
        for hook in hooks:
            hook.bind(self.state)

    def _make_program(self, own_groups: int, acceptance: Acceptance) -> None:
        """Makes the program. own_groups: KV groups of the model that gives the tokens."""
        model, layers = self.loaded.model, self.cache.layers
        lanes = ModelLanes(model, self.state, layers, range(own_groups), self.state.position)
        self.program = StepProgram(lanes, self.hooks, acceptance.claims)

    def add_rare(self, parameters: Sequence[str]) -> None:
        """Adds the hooks of these parameters."""
        for parameter in parameters:
            hook = _RARE_HOOKS[parameter]()
            hook.attach(self.loaded.model)
            hook.bind(self.state)
            self.rare.remove(parameter)
            self.hooks = self.program.hooks = (*self.hooks, hook)

    def add_feature(self, hook: Hook) -> None:
        """Adds a feature's hook, from the next plan on.

        Raises:
            QuireError: the hook keeps columns, which the batch state must have from the start.
        """
        if tuple(hook.columns(self.loaded.limits)):
            raise QuireError(f"{type(hook).__name__} must be known when the runner starts")
        hook.bind(self.state)
        behind = self.hooks[1 + len(self.features) :]
        self.features = tuple(sorted((*self.features, hook), key=lambda each: each.draws))
        self.hooks = (self.hooks[0], *self.features, *behind)
        self.program.hooks = self.hooks
