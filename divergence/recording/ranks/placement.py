"""What each rank holds of a tensor that a module handed over: known by rule, or not stated.

Under transformers' tensor parallelism the tensors between modules are plain local ones, so their
meaning must come from elsewhere. Three sources, which must not contradict one another:

* the plan: what a style says of its module's input and output (transformers 5.23,
  ``distributed/tensor_parallel.py``): ``colwise`` takes whole rows and gives its share of the
  features, ``rowwise`` the reverse, its partial products summed over all ranks before anybody
  sees them; the embedding and a gathering head give whole tensors;
* the shape: the whole model's, run once on torch's meta device with the same batch. A dimension
  that is smaller here by exactly this rank's share (torch.chunk's) is divided; a tensor of the
  whole shape is a copy, since terms of a sum are not seen at any module boundary, except inside
  modules that sum in the end (experts), where nothing is said of it;
* DTensor, where a model hands over one: its own placements.

Where they leave it open the record says nothing, and a comparison counts the tensor as not
compared. An unknown style leaves everything inside its block open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from divergence.recording.model.structure import inside
from divergence.run.schema.site import ROOT, module_of, split_site

__all__ = ["TensorPlacement", "share_of"]

LAST = "last"
_STYLES: dict[str, tuple[str | None, str | None]] = {
    # style → input, output; None: by shape
    "colwise": ("replicate", LAST),
    "rowwise": (LAST, "replicate"),
    "colwise_gather_output": ("replicate", "replicate"),
    "colwise_rep": ("replicate", "replicate"),
    "rowwise_split_input": ("replicate", "replicate"),
    "rowwise_rep": ("replicate", "replicate"),
    "embedding_rowwise": ("replicate", "replicate"),
    "embedding_colwise": ("replicate", "replicate"),
    "mla_kv_a_proj": ("replicate", "replicate"),
    "moe_tp_experts": ("replicate", "replicate"),
    "replicated_with_grad_allreduce": (None, None),
    "replicate": (None, None),
    "local_params": (None, None),
    "all_reduce": (None, "replicate"),
}
_SUMMING = frozenset({"moe_tp_experts", "all_reduce"})
"""Inside these a tensor of the whole shape may be a term of a sum."""
_INTERLEAVED = frozenset({"packed_colwise"})
"""Several matrices in one, each divided: the shares laid side by side are not the whole."""


class TensorPlacement:
    """Says for each site what of it one rank of the ``tp`` axis holds.

    ``plan``: module path → style. ``whole``: site → shape in the undivided model, for the batch
    whose prefill decides a site, once for every step. ``containers``: the modules that hold the
    blocks; their inputs are given to all ranks.
    """

    def __init__(
        self,
        plan: Mapping[str, str],
        whole: Mapping[str, tuple[int, ...]],
        *,
        size: int,
        place: int,
        containers: Collection[str] = (),
    ) -> None:
        self._plan, self._whole = plan, whole
        self._containers = frozenset(containers)
        self._size, self._place = size, place
        self._known: dict[str, str | None] = {}
        self._summing = [path for path, style in plan.items() if style in _SUMMING]
        strange = [path for path, style in plan.items() if style not in {*_STYLES, *_INTERLEAVED}]
        self._strange = {path.rpartition(".")[0] or ROOT for path in strange}

    def __call__(self, site: str, shape: tuple[int, ...], *, settled: bool) -> str | None:
        """The word for the record, or None where nothing can be said. ``settled``: is this the
        batch and the step that ``whole`` was made for?"""
        if (settled or self._is_given(site)) and site not in self._known:
            self._known[site] = self._decide(site, shape)
        word = self._known.get(site)
        if word is not None and word.startswith("shard:") and int(word[6:]) >= len(shape):
            return None
        return word

    def _decide(self, site: str, shape: tuple[int, ...]) -> str | None:
        path, port = module_of(site), split_site(site)[1]
        style = self._plan.get(path)
        if style in _INTERLEAVED:
            return self._seen(site, shape) if port == "in" else None
        if inside(path, self._strange):
            return None
        if self._is_given(site):
            return "replicate"
        said = None
        if style is not None and port in ("in", "out"):
            said = _STYLES[style][port == "out"]
            if said == LAST:
                said = f"shard:{len(shape) - 1}"
        seen = self._seen(site, shape)
        if said is not None:
            # where the shapes are known they must agree
            return said if site not in self._whole or seen == said else None
        if seen == "replicate" and any(path.startswith(prefix + ".") for prefix in self._summing):
            return None
        return seen

    def _is_given(self, site: str) -> bool:
        """Does it enter the model as a whole, before any division?"""
        return module_of(site) in self._containers and split_site(site)[1].startswith("in")

    def _seen(self, site: str, shape: tuple[int, ...]) -> str | None:
        """What the shape says."""
        whole = self._whole.get(site)
        if whole is None or len(whole) != len(shape):
            return None
        different = [dim for dim, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b]
        if not different:
            return "replicate"
        dim = different[0]
        if len(different) == 1 and shape[dim] == share_of(whole[dim], self._size, self._place):
            return f"shard:{dim}"
        return None


def share_of(length: int, size: int, place: int) -> int:
    """How much of ``length`` place ``place`` of ``size`` gets: torch.chunk's division."""
    chunk = -(-length // size)
    return max(0, min(chunk, length - place * chunk))
