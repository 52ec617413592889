"""The second phase of a worker: a loaded model with its KV cache, batch state and program."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import QuireError
from quire.plan import KVGroup
from quire.runner.hooks import GateHook, Hook, HostHook, ProgramHook
from quire.runner.hooks.acceptance import Acceptance
from quire.runner.hooks.logprobs import ProcessedLogprobs, SampledLogprobs
from quire.runner.hooks.penalties import Penalties
from quire.runner.hooks.prompt_logprobs import PromptLogprobs
from quire.runner.hooks.sampling import Sampling
from quire.runner.kv_cache import KVCache
from quire.runner.loaded_model import LoadedModel
from quire.runner.program import BoundModel, StepProgram
from quire.runner.state import BatchState
from quire.runner.transfer.place import KVTransfer, Place

_RARE_HOOKS: dict[str, type[SampledLogprobs | PromptLogprobs]] = {
    hook.name: hook for hook in (SampledLogprobs, ProcessedLogprobs, PromptLogprobs)
}
"""Hooks that few requests need, by the parameter that asks for them.

Captured programs have them from the start. Without graphs, the first request that needs one adds
it.
"""


class SizedModel:
    """The memory of a worker, and the program that runs over it.

    Attributes:
        loaded: the models.
        num_blocks: number of blocks of each KV group.
        cache: the KV cache.
        state: the batch state, with per-lane columns and a step's inputs.
        features: the hooks of features, in order.
        hooks: all hooks, in the order of their calls.
        host_hooks: the hooks with a part on the host.
        program_hooks: the hooks with a part in the programs.
        gate: the `GateHook`, or None.
        program: the bodies and heads. They call the program hooks.
        transfer: moves blocks to and from places outside the device, or None.
        rare: parameters whose hooks are not in use yet.
    """

    state: BatchState
    hooks: tuple[Hook, ...]
    host_hooks: tuple[HostHook, ...]
    program_hooks: tuple[ProgramHook, ...]
    gate: GateHook | None
    program: StepProgram

    def __init__(
        self, loaded: LoadedModel, num_blocks: tuple[int, ...], features: Sequence[Hook]
    ) -> None:
        self.loaded = loaded
        self.num_blocks = num_blocks
        self.features = tuple(features)
        with loaded.kv_memory.allocate():
            self.cache = KVCache(
                loaded.groups,
                num_blocks,
                layouts=[layout for model in loaded.models for layout in model.kv_layouts],
                kv_format=loaded.kv_format,
                device=loaded.device,
                head_scales=loaded.head_scales(),
            )
        places: dict[str, Place] = {}
        for hook in features:
            places |= hook.places(self.cache, loaded.models, loaded.group)
        self.transfer = KVTransfer(places) if places else None
        self.rare = list(_RARE_HOOKS)
        self._prepare(loaded.groups)
        for hook in features:
            self._give_memory(hook)

    def _give_memory(self, hook: Hook) -> None:
        loaded = self.loaded
        hook.take_memory(loaded.weight_memory, loaded.kv_memory, self.cache, loaded.models)

    def _prepare(self, groups: Sequence[KVGroup]) -> None:
        """Makes the batch state, and the program over it."""
        config = self.loaded.config
        penalties = Penalties(config.vocab_size)
        acceptance = Acceptance(config.eos_token_ids, penalties)
        self._set_hooks((penalties, *self.features, Sampling(), acceptance))
        self._make_state(groups, self.rare)
        for hook in self.features:
            hook.take_cache(self.cache)
        self._make_program(len(self.loaded.model.kv_layouts), acceptance)

    def _set_hooks(self, hooks: tuple[Hook, ...]) -> None:
        self.hooks = hooks
        self.host_hooks = tuple(hook for hook in hooks if isinstance(hook, HostHook))
        self.program_hooks = tuple(hook for hook in hooks if isinstance(hook, ProgramHook))
        self.gate = next((hook for hook in hooks if isinstance(hook, GateHook)), None)

    def _make_state(self, groups: Sequence[KVGroup], rare: Sequence[str] = ()) -> None:
        """Makes a batch state with the columns of all hooks, and of the `rare` parameters."""
        limits = self.loaded.limits
        columns = [column for hook in self.hooks for column in hook.columns(limits)]
        columns += [column for name in rare for column in _RARE_HOOKS[name].rare_columns()]
        # A step's results stay in host memory until the host has read them.
        slots = self.loaded.config.scheduler.steps_in_flight + 1
        self.state = BatchState(limits, groups, self.loaded.device, columns, slots)
        for hook in self.hooks:
            hook.bind(self.state)

    def _make_program(self, own_groups: int, acceptance: Acceptance) -> None:
        """Makes the program.

        Args:
            own_groups: number of KV groups of the model that gives the tokens.
        """
        model, layers = self.loaded.model, self.cache.layers
        fuses = "fusions" not in self.loaded.policy.disabled
        bound = BoundModel(
            model, self.state, layers, range(own_groups), self.state.position, fused=fuses
        )
        self.program = StepProgram(bound, self.program_hooks, acceptance.claims)

    def add_rare(self, parameters: Sequence[str]) -> None:
        """Adds the hooks of these parameters."""
        for parameter in parameters:
            hook = _RARE_HOOKS[parameter].made_for(self.loaded.config.args)
            hook.attach(self.loaded.model)
            hook.bind(self.state)
            self.rare.remove(parameter)
            self._change_hooks((*self.hooks, hook))

    def add_feature(self, hook: Hook) -> None:
        """Adds a feature's hook, from the next plan on.

        Raises:
            QuireError: the hook keeps columns, which the batch state must have from the start.
        """
        if tuple(hook.columns(self.loaded.limits)):
            raise QuireError(
                f"{type(hook).__name__} keeps columns, so it must be known when the runner starts"
            )
        hook.attach(self.loaded.model)
        hook.bind(self.state)
        self._give_memory(hook)
        rest = self.hooks[1 + len(self.features) :]
        self.features = tuple(sorted((*self.features, hook), key=lambda each: each.draws))
        self._change_hooks((self.hooks[0], *self.features, *rest))

    def _change_hooks(self, hooks: tuple[Hook, ...]) -> None:
        self._set_hooks(hooks)
        self.program.hooks = self.program_hooks
