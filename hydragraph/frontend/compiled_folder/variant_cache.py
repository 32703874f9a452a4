"""Cache of traced variants in the user's cache folder, so that a later run does not trace the same blocks again.

Tracing and splitting a block takes seconds, and reading the result takes hundredths. A file is named by the digest of
everything that determines its graphs: the spec (`VariantSpec.key`), versions, and the sources that make graphs. It is
data, and is validated like the files of a compiled folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import zlib
from pathlib import Path

from hydragraph.frontend import user_cache
from hydragraph.frontend.compiled_folder.manifest import own_code, read_json, versions
from hydragraph.frontend.compiled_folder.program_records import variant_data, variant_of
from hydragraph.frontend.compiled_folder.record_schema import Malformed
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.graph_passes import VariantSpec

GRAPHS = "graphs"  # name of the folder
MOST = 4096  # files; those used longest ago are deleted
LARGEST = 1 << 28  # bytes of JSON in one file

_LOG = logging.getLogger(__name__)


class VariantCache:
    """Variants of every program, as the user's cache folder has them."""

    def variant(self, spec: VariantSpec) -> Variant | None:
        """Return the variant of a spec, before any backend compiled it, or None if none can be read."""
        path = _path(spec)
        packed = user_cache.read(path)
        if packed is None:
            return None
        try:
            content = zlib.decompressobj().decompress(packed, LARGEST)
            return variant_of(read_json(content, path.name), spec, path.name)
        except (Malformed, zlib.error) as error:
            _LOG.info("%s is not used: %s", path, error)
            return None

    def keep(self, spec: VariantSpec, variant: Variant) -> None:
        """Write the variant of a spec, unless its graphs cannot be represented as data."""
        try:
            content = json.dumps(variant_data(variant), allow_nan=False)
        except ValueError as error:
            _LOG.info("the graphs of %s are not kept: %s", spec.where, error)
            return
        user_cache.write(_path(spec), zlib.compress(content.encode(), 3))
        user_cache.evict(GRAPHS, MOST)

    def __str__(self) -> str:
        return f"the cache in {user_cache.folder(GRAPHS)}"


def _path(spec: VariantSpec) -> Path:
    name = hashlib.sha256(f"{_made_by()} {spec.key}".encode()).hexdigest()
    return user_cache.folder(GRAPHS) / f"{name[:40]}.json.z"


@functools.cache
def _made_by() -> str:
    return f"{sorted(versions().items())} {own_code()}"
