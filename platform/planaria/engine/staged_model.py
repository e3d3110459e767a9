"""One pipeline rank's stages, run by the code of the unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from planaria.config import JobConfig
from planaria.engine import collectives as c
from planaria.engine.sharded import check_model
from planaria.engine.stages import StageCut, balanced_bounds, cut_model, is_sharded_sequence, stage_layers, swap
from planaria.layout import Layout, LayoutError
from planaria.recipe import Recipe, ShardingRules, StagedRecipe


class _StageDone(Exception):
    """A stage that is not the last has its output: nothing of the loss that called it can be computed here."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out


class _Callable:
    """A model whose call is another function."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class StagedModel:
    """Runs the stages of ``cut``.

    Made after :func:`planaria.engine.stages.cut_model` and before the model is sharded; the root of the model keeps
    its hooks (FSDP2's), while what lies below is put together for one stage at a time.

    Args:
        sequence_groups: over which ranks the sequence of activations between stages is sharded, the finest cut first.
    """

    def __init__(
        self, recipe: StagedRecipe, model: nn.Module, cut: StageCut, sequence_groups: Sequence[dist.ProcessGroup]
    ) -> None:
        self.model, self.cut = model, cut
        self._recipe, self._groups = recipe, sequence_groups
        self._original: Callable[..., Any] = model.forward
        self._stage: int | None = None
        self._hidden: Tensor | None = None
        self._parts: dict[int, Any] = {}
        model.forward = self._dispatch

    def run(self, stage: int, hidden: Tensor | None, function: Callable[[nn.Module], Tensor]) -> Tensor:
        """Output of ``stage`` for the input ``hidden`` (none for stage 0) where ``function`` calls the model.

        On the last stage that is what ``function`` returns, elsewhere hidden states.
        """
        # FSDP2 looks for what lies below the root at its first call: it must see all stages of this rank.
        assert isinstance(self.model, FSDPModule)
        self.model._get_fsdp_state()._lazy_init()
        self._stage, self._hidden = stage, hidden
        parts, _ = self._prepared(stage)
        before = swap(self.model, parts)
        try:
            result = function(cast(nn.Module, _Callable(self.model, self._call)))
        except _StageDone as done:
            return done.out
        finally:
            swap(self.model, before)
            self._stage = self._hidden = None
        if stage != self.cut.stages - 1:
            raise RuntimeError(f"{type(self._recipe).__name__}: loss() and score() must call the model they are given")
        return result

    @staticmethod
    def local(tensor: Tensor) -> Tensor:
        """The local shard."""
        return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()

    def _prepared(self, stage: int) -> Any:
        # Made at first use: sharding has given the layers their hooks by then.
        if stage not in self._parts:
            self._parts[stage] = stage_layers(self.model, self.cut, stage)
        return self._parts[stage]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """What the recipe calls: the root with its hooks."""
        out = self.model(*args, **kwargs)
        if self._stage != self.cut.stages - 1:
            raise _StageDone(out)
        return out

    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """The root's forward()."""
        if self._stage is None:
            raise RuntimeError("a model in pipeline stages runs by way of its passes alone")
        if self._hidden is None:
            out = self._original(*args, **kwargs)
        else:
            hidden = self._hidden
            for group in self._groups:
                # The layers take their part of it again, so that is where all the gradient comes from.
                hidden = c.join_sequence(hidden, group)
            model = cast(nn.Module, _Callable(self.model, self._original))
            out = self._recipe.resume(model, hidden, *args, **kwargs)
        _, exit_ = self._prepared(self._stage)
        if exit_ is None:
            return out
        hidden, exit_.arrived = exit_.arrived, None
        if hidden is None:
            raise RuntimeError(f"stage {self._stage}: its layers did not run, or gave no hidden states")
        return hidden


def staged_model(
    recipe: Recipe, job: JobConfig, model: nn.Module, sharding: ShardingRules, layout: Layout, mesh: DeviceMesh
) -> StagedModel:
    """Cut ``model`` in place for this rank's stages, before it is sharded.

    Raises:
        LayoutError: the recipe declares no stages, or fewer layers than the layout has stages.
        ShardingError: its rules do not fit the model.
    """
    if not isinstance(recipe, StagedRecipe):
        raise LayoutError(
            f"layout {layout}: {type(recipe).__name__} does not say where its model may be cut into stages; implement "
            "stage_rules() and resume() (planaria.recipe.StagedRecipe), or set layout.pp=1"
        )
    rules, stages = recipe.stage_rules(model), layout.pp * job.layout.virtual_stages
    free = len(rules.layers) - rules.together + 1
    if stages > free:
        bound = f" ({rules.together} in the first stage)" if rules.together > 1 else ""
        raise LayoutError(
            f"layout {layout}: {len(rules.layers)} layers{bound} cannot be cut into {stages} stages (pp={layout.pp}, "
            f"virtual_stages={job.layout.virtual_stages}); lower layout.pp or layout.virtual_stages"
        )
    check_model(model, sharding)
    bounds = balanced_bounds(model, rules, stages)
    cut = cut_model(model, sharding, rules, bounds, layout.pp, layout.coords(mesh.get_rank())["pp"])
    groups = []
    if is_sharded_sequence(cut.sharding, rules):
        if layout.tp > 1 and job.layout.sequence_parallel:
            groups.append(mesh.get_group("tp"))
        if layout.cp > 1:
            groups.append(mesh.get_group("cp"))
    return StagedModel(recipe, model, cut, groups)
