"""transformers' model_addition_debugger_context (src/transformers/model_debugging_utils.py).

By default mean, std, min and max of each tensor are printed, in
``CLASS_debug_tree_FULL_TENSORS.json`` and ``..._SUMMARY.json``, and are taken as statistics. With
``use_repr=False`` there is one safetensors file a tensor, ``CLASS.PATH_inputs_args_0.safetensors``,
and the nodes of the tree name them in order of execution.

It keeps inputs of every module, outputs of those without children and of the model, and the last
forward alone: each overwrites the one before. Blocks that its tree leaves out (``do_prune_layers``)
have files all the same; they are named as those that the tree holds. It is written when the forward
ends, so without it the dump is half written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from divergence.domains.importing.dumped import Dumped, DumpedForward, Notes, leaves, module_site
from divergence.domains.importing.layouts import Layout, holding
from divergence.domains.importing.layouts.statistics import kept_of, told_by, with_digits
from divergence.domains.importing.rules import Rules
from divergence.errors import DumpError
from divergence.run.foreign import DumpFolder
from divergence.run.site import natural_key

_TREE = "_debug_tree_FULL_TENSORS.json"
_SUMMARY = "_debug_tree_SUMMARY.json"
_SUFFIX = ".safetensors"
_KNOWN = re.compile(rf"[^/]+(?:{_TREE}|{_SUMMARY}|_inputs_(?:args|kwargs)_[^/]+\.safetensors)")
_FILE = re.compile(r"[^/]+_(?:inputs|outputs)(?:_[^/]*)?\.safetensors")
_NUMBER = re.compile(r"\.\d+(?=[._])")


def read(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    trees = [name for name in folder.names if name.endswith(_TREE) and "/" not in name]
    if not trees and not any(name.endswith(_SUFFIX) for name in folder.names):
        trees = [name for name in folder.names if name.endswith(_SUMMARY) and "/" not in name]
    if len(trees) != 1:
        raise DumpError(
            f"{len(trees)} files are called *{_TREE}, not one: "
            + ("dumps of several models" if trees else "the forward did not end"),
            where=str(folder.path),
            hint="dump each model into a folder of its own",
        )
    kind = trees[0].removesuffix(_TREE).removesuffix(_SUMMARY)
    sites, kept = _sites(folder.json(trees[0]), kind, folder.where(trees[0]))
    if kept and not sites:
        notes.say(
            "the dump holds printed statistics, no tensors: they can show a fault, and no health "
            "(tensors: model_addition_debugger_context(..., use_repr=False))"
        )
        yield DumpedForward(where=folder.where(trees[0]), tensors=kept, number=0)
        return
    sites |= _pruned(sites, folder)
    for name in ("logits", "last_hidden_state"):  # the tree keeps outputs of the last modules alone
        if (file := f"{kind}_outputs_{name}{_SUFFIX}") in folder.names:
            sites.setdefault(file, module_site("", "out"))
    tensors = []
    for name, site in sites.items():
        value = folder.value(name)
        tensor = value.get("data") if isinstance(value, dict) else None
        if not isinstance(tensor, torch.Tensor):
            raise DumpError("the file holds no tensor called data", where=folder.where(name))
        tensors.append(Dumped(site=site, tensor=tensor))
    unknown = [n for n in folder.names if _FILE.fullmatch(n) and n not in sites]
    notes.add("that the debugger's tree does not name were left out", len(unknown))
    yield DumpedForward(where=folder.where(trees[0]), tensors=tensors, number=0)


def _sites(tree: Any, kind: str, where: str) -> tuple[dict[str, str], list[Dumped]]:
    """The site of each file; and what is known of tensors that were printed."""
    sites: dict[str, str] = {}
    printed: dict[str, Dumped] = {}

    def is_leaf(value: Any) -> bool:
        return isinstance(value, dict) and {"shape", "dtype"} <= value.keys()

    def add(path: str, port: str, value: Any) -> None:
        for name, leaf in leaves(value, port, is_leaf):
            file = leaf.get("value")
            if not isinstance(file, str):
                site = module_site(path, name)
                kept = kept_of(
                    site,
                    [int(size) for size in re.findall(r"\d+", str(leaf["shape"]))],
                    str(leaf["dtype"]),
                    **told_by(leaf, "min", "max", "mean", std="std"),
                )
                if kept is not None:
                    printed.setdefault(site, kept)
                continue
            if not re.fullmatch(r"\./[^/]+", file):
                raise DumpError(
                    f"the tree names a file outside the folder: {file[:80]!r}", where=where
                )
            sites.setdefault(file.removeprefix("./"), module_site(path, name))

    def visit(node: Any) -> None:
        if not isinstance(node, dict) or not isinstance(node.get("module_path"), str):
            raise DumpError("the file is no tree of the debugger", where=where)
        path = node["module_path"].removesuffix(" (top-level)")
        path = "" if path == kind else path.removeprefix(f"{kind}.")
        given = node.get("inputs") or {}
        args = given.get("args", []) if isinstance(given, dict) else given
        kwargs = given.get("kwargs", {}) if isinstance(given, dict) else {}
        named = {**dict(enumerate(args)), **kwargs} if isinstance(args, list) else kwargs
        add(path, "in", named)
        for child in node.get("children") or []:
            visit(child)
        add(path, "out", node.get("outputs"))

    visit(tree)
    return sites, with_digits(list(printed.values()))


def _pruned(sites: dict[str, str], folder: DumpFolder) -> dict[str, str]:
    """Files of blocks that the tree leaves out, by those of the blocks that it holds."""
    shapes: dict[str, tuple[str, str]] = {}
    for name, site in sites.items():
        shapes.setdefault(_NUMBER.sub(".*", name), (name, site))
    pruned: dict[str, str] = {}
    for name in sorted(folder.names, key=natural_key):
        like = shapes.get(_NUMBER.sub(".*", name))
        if name in sites or like is None:
            continue
        numbers = iter(_NUMBER.findall(name))
        pruned[name] = re.sub(r"\.\d+(?=[.:])", lambda _, left=numbers: next(left), like[1])  # type: ignore[misc]  # a default holds the loop's value
    return pruned


DEBUGGER = Layout(words="transformers' debugger", recognise=holding(_KNOWN), read=read)
