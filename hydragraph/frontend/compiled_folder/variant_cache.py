"""Cache of traced graphs (variants)."""

from __future__ import annotations

import functools
from pathlib import Path

from hydragraph.frontend import user_cache
from hydragraph.frontend.compiled_folder.manifest import own_code, read_json, versions
from hydragraph.frontend.compiled_folder.program_records import variant_data, variant_of
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variant_spec import VariantSpec

GRAPHS = "graphs"
MOST = 4096  # files


class VariantCache:
    """Variants in the user's cache, keyed by spec, package versions and hydragraph's code."""

    def variant(self, spec: VariantSpec) -> Variant | None:
        path = _path(spec)
        return user_cache.read_packed(path, lambda content: variant_of(read_json(content, path.name), spec, path.name))

    def has(self, spec: VariantSpec) -> bool:
        return _path(spec).exists()

    def keep(self, spec: VariantSpec, variant: Variant) -> None:
        user_cache.write_packed(_path(spec), lambda: variant_data(variant), MOST)

    def __str__(self) -> str:
        return f"the cache in {user_cache.folder(GRAPHS)}"


def _path(spec: VariantSpec) -> Path:
    return user_cache.packed_path(GRAPHS, f"{_made_by()} {spec.key}")


@functools.cache
def _made_by() -> str:
    return f"{sorted(versions().items())} {own_code()}"
