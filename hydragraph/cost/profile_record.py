"""A profile's fields as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any

from hydragraph.cost.block_pieces import BlockPiece, MemoryLines, PricedDevice, Scheme
from hydragraph.cost.curves import Constants, curve_record, read_constants
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.published_memory import MemoryModel
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.stage_kind import StageKind


def saved(fields: Mapping[str, Any]) -> dict[str, Any]:
    by_scheme = ("limits", "failed", "residuals")
    records = ("memory", "device", "link")
    pieces = {
        kind.text: {template: _piece_record(piece) for template, piece in of_kind.items()}
        for kind, of_kind in fields["pieces"].items()
    }
    return {
        **fields,
        **{name: fields[name] and asdict(fields[name]) for name in records},
        **{name: {_text(scheme): value for scheme, value in fields[name].items()} for name in by_scheme},
        "schemes": {_text(scheme): curve_record(k) for scheme, k in fields["schemes"].items()},
        "pieces": pieces,
        "unfit": {kind.text: why for kind, why in fields["unfit"].items()},
        "sizes": fields["sizes"] and fields["sizes"].to_record(),
        "others": [
            saved({f.name: getattr(other, f.name) for f in dataclass_fields(other)}) for other in fields["others"]
        ],
    }


def loaded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields from the JSON values of `saved`; older files contain fewer fields."""
    memory = data["memory"]
    device = data.get("device")
    link = data.get("link")
    sizes = data.get("sizes")
    plain = ("type", "commit_s", "norm_s", "efficiency", "roofline")
    tuples = ("blocks", "notes", "update")
    pieces = {
        StageKind.parse(kind): {template: _read_piece(piece) for template, piece in of_kind.items()}
        for kind, of_kind in data.get("pieces", {}).items()
    }
    return {
        **{name: data[name] for name in plain if name in data},
        **{name: tuple(data[name]) for name in tuples if data.get(name)},
        "name": data["name"],
        "hetero_sync_s": data["hetero_sync_s"],
        "limits": {_scheme(scheme): int(tokens) for scheme, tokens in data["limits"].items()},
        "failed": {_scheme(scheme): why for scheme, why in data["failed"].items()},
        "residuals": {_scheme(scheme): float(value) for scheme, value in data.get("residuals", {}).items()},
        "schemes": {_scheme(scheme): read_constants(k) for scheme, k in data["schemes"].items()},
        "util": {int(tp): int(tokens) for tp, tokens in data["util"].items()},
        "memory": memory and MemoryModel(**{**memory, **_tables(memory)}),
        "pieces": pieces,
        "unfit": {StageKind.parse(kind): why for kind, why in data.get("unfit", {}).items()},
        "device": device and PricedDevice(**device),
        "link": link and Interconnect(**{**link, "points": [tuple(p) for p in link.get("points", ())]}),
        "messages": tuple((int(size), float(seconds)) for size, seconds in data.get("messages", ())),
        "sizes": sizes and ModelSizes.from_record(sizes),
    }


def _piece_record(piece: BlockPiece) -> dict[str, Any]:
    curves = {name: curve_record(curve) for name in ("forward", "backward") if (curve := getattr(piece, name))}
    kept = {f.name: getattr(piece, f.name) for f in dataclass_fields(piece) if f.name not in ("forward", "backward")}
    return {**kept, "seconds": curve_record(piece.seconds), "held": piece.held and asdict(piece.held), **curves}


def _read_piece(data: Mapping[str, Any]) -> BlockPiece:
    curves = {name: read_constants(data[name]) for name in ("forward", "backward") if data.get(name)}
    record = data.get("held")
    details = record and MemoryLines(
        **{  # type: ignore[arg-type]
            k: tuple(v) if isinstance(v, list) else v for k, v in record.items()
        }
    )
    pairs = {name: tuple(data[name]) for name in ("reduced", "during_sums", "before_sums") if name in data}
    rest = {"seconds": read_constants(data["seconds"]), "held": details}
    return BlockPiece(**{**data, **rest, **pairs, **curves})


def published(entry: Mapping[str, Any]) -> dict[str, Any]:
    schemes: dict[Scheme, Constants] = {}
    failed: dict[Scheme, str] = {}
    for row in entry["schemes"]:
        scheme = (int(row["tp"]), int(row["pp"]))
        k = Constants(row["a_ms_per_token2"] / 1e3, row["b_ms_per_token"] / 1e3, row["c_ms"] / 1e3)
        if k.failed:
            failed[scheme] = f"its fit failed (a = {k.a:g}, b = {k.b:g}, c = {k.c:g})"
        else:
            schemes[scheme] = k
    model = entry["model"]
    memory = entry["memory"]
    return {
        "name": str(entry["name"]),
        "schemes": schemes,
        "util": {int(tp): int(tokens) for tp, tokens in entry["util_len_tokens"].items()},
        "memory": MemoryModel(
            model["hidden"],
            model["layers"],
            model["vocab"],
            {int(tp): float(value) for tp, value in memory["activation_A"].items()},
            memory["states_B"],
            memory["alpha"],
            _gaps(memory["gap_bytes"], entry.get("gpus_per_node", 8)),
            memory["safety_margin_bytes"],
            memory["device_bytes"],
        ),
        "hetero_sync_s": entry.get("hetero_sync_ms", 0) / 1e3,
        "failed": failed,
    }


def _tables(memory: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "activation": {int(tp): a for tp, a in memory["activation"].items()},
        "gap": tuple((int(n), float(g)) for n, g in memory["gap"]),
    }


def _text(scheme: Scheme) -> str:
    return f"tp{scheme[0]}pp{scheme[1]}"


def _scheme(text: str) -> Scheme:
    tp, _, pp = text.removeprefix("tp").partition("pp")
    return int(tp), int(pp)


def _gaps(by_name: Mapping[str, float], per_node: int) -> tuple[tuple[int, float], ...]:
    sizes = {per_node if name == "node" else int(name.removeprefix("gpu")): float(v) for name, v in by_name.items()}
    return tuple(sorted(sizes.items()))
