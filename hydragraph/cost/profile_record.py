"""A profile as plain data, field by field as in `Profile`: its JSON file, and tables of published constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any

from hydragraph.cost.block_pieces import Held, Piece, PricedDevice, Scheme
from hydragraph.cost.curves import Constants, curve_record, read_constants, read_curve
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.published_memory import MemoryModel
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.stage_kind import StageKind


def saved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile's fields as JSON values."""
    # Keys become text and tuples lists; None stays None, so that a reader sees what was not measured.
    memory = fields["memory"]
    device = fields["device"]
    link = fields["link"]
    return {
        **fields,
        "schemes": {_text(s): curve_record(k) for s, k in fields["schemes"].items()},
        "util": dict(fields["util"]),
        "memory": asdict(memory) if memory else None,
        "limits": {_text(s): tokens for s, tokens in fields["limits"].items()},
        "failed": {_text(s): why for s, why in fields["failed"].items()},
        "blocks": list(fields["blocks"]),
        "pieces": {
            kind.text: {t: _piece_record(piece) for t, piece in pieces.items()}
            for kind, pieces in fields["pieces"].items()
        },
        "unfit": {kind.text: why for kind, why in fields["unfit"].items()},
        "device": asdict(device) if device else None,
        "link": asdict(link) if link else None,
        "messages": [list(row) for row in fields["messages"]],
        "residuals": {_text(s): value for s, value in fields["residuals"].items()},
        "notes": list(fields["notes"]),
        "sizes": fields["sizes"] and fields["sizes"].to_record(),
        "update": fields["update"] and list(fields["update"]),
        "others": [
            saved({f.name: getattr(other, f.name) for f in dataclass_fields(other)}) for other in fields["others"]
        ],
    }


def loaded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields given to `saved`; those that only measured profiles have may be missing."""
    memory = data["memory"]
    device = data.get("device")
    link = data.get("link")
    return {
        "name": data["name"],
        "schemes": {_scheme(s): read_constants(k) for s, k in data["schemes"].items()},
        "util": {int(tp): int(tokens) for tp, tokens in data["util"].items()},
        "memory": memory and MemoryModel(**{**memory, **_tables(memory)}),
        "limits": {_scheme(s): int(tokens) for s, tokens in data["limits"].items()},
        "hetero_sync_s": data["hetero_sync_s"],
        "failed": {_scheme(s): why for s, why in data["failed"].items()},
        "blocks": tuple(data.get("blocks", ())),
        "pieces": {
            StageKind.parse(kind): {t: _read_piece(p) for t, p in pieces.items()}
            for kind, pieces in data.get("pieces", {}).items()
        },
        "unfit": {StageKind.parse(kind): why for kind, why in data.get("unfit", {}).items()},
        "device": device and PricedDevice(**device),
        "link": link and Interconnect(**{**link, "points": [tuple(p) for p in link.get("points", ())]}),
        "messages": tuple((int(size), float(seconds)) for size, seconds in data.get("messages", ())),
        "residuals": {_scheme(s): float(value) for s, value in data.get("residuals", {}).items()},
        "notes": tuple(data.get("notes", ())),
        "type": data.get("type", ""),
        "sizes": data.get("sizes") and ModelSizes.from_record(data["sizes"]),
        "update": tuple(data["update"]) if data.get("update") else None,
        "commit_s": data.get("commit_s", 0.0),
        "norm_s": data.get("norm_s", 0.0),
        "efficiency": data.get("efficiency"),
    }


def _piece_record(piece: Piece) -> dict[str, Any]:
    curves = {name: curve_record(curve) for name in ("forward", "backward") if (curve := getattr(piece, name))}
    kept = {f.name: getattr(piece, f.name) for f in dataclass_fields(piece) if f.name not in ("forward", "backward")}
    return {**kept, "seconds": curve_record(piece.seconds), "held": piece.held and asdict(piece.held), **curves}


def _read_piece(data: Mapping[str, Any]) -> Piece:
    """Read a piece; those of older files have no separate curves and no details of their memory."""
    curves = {name: read_curve(data[name]) for name in ("forward", "backward") if data.get(name)}
    # JSON has no tuples: lines over the tokens come back as lists.
    record = data.get("held")
    details = record and Held(
        **{  # type: ignore[arg-type]
            k: tuple(v) if isinstance(v, list) else v for k, v in record.items()
        }
    )
    rest = {"seconds": read_constants(data["seconds"]), "reduced": tuple(data.get("reduced", (0, 0))), "held": details}
    return Piece(**{**data, **rest, **curves})


def published(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one entry of a table of published constants (see `Profile.from_constants`)."""
    schemes: dict[Scheme, Constants] = {}
    failed: dict[Scheme, str] = {}
    for row in entry["schemes"]:
        scheme = (int(row["tp"]), int(row["pp"]))
        # Published tables are in milliseconds; some of their fits failed, and are kept as failed rather than used.
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
    """Convert values that JSON cannot represent: keys that are numbers, and tuples."""
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
    """Return (maximum number of devices, bytes), ascending; "node" covers any number from a whole node on."""
    sizes = {per_node if name == "node" else int(name.removeprefix("gpu")): float(v) for name, v in by_name.items()}
    return tuple(sorted(sizes.items()))
