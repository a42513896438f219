"""JSON Schemas of the tools, cut down from the pydantic models that check the same data.

An agent pays for every token of the tool list in every conversation, and some
hosts refuse all tools for one schema they don't like. So: no `$schema`, no
titles, no `$ref`, no `anyOf`, no list of types. What is left out (patterns,
lengths of nested strings) is still checked, and a fault says what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pydantic import BaseModel

#: Kept of each argument; what is not listed here costs more tokens than it tells an agent.
_KEPT: Final = ("type", "format", "enum", "description", "default", "minimum", "maximum", "items")
_CHOICES: Final = ("enum", "minimum", "maximum")
_NULL: Final = {"type": "null"}


def input_schema(model: type[BaseModel], known: type[BaseModel] | None = None) -> dict[str, Any]:
    """The closed schema of a tool's arguments.

    A field that `known`, the model of another tool, has with the same choices
    is given without them: an agent reads them there.
    """
    schema = model.model_json_schema()
    defs = schema.get("$defs", {})
    told = known.model_fields if known else {}
    properties = {name: _argument(node, defs, told=name in told) for name, node in schema.get("properties", {}).items()}
    required = {"required": schema["required"]} if "required" in schema else {}
    return {"type": "object", "properties": properties, **required, "additionalProperties": False}


def output_schema(model: type[BaseModel], told: Iterable[str]) -> dict[str, Any]:
    """The types of the fields of an answer that an agent goes on with; an answer may carry more."""
    schema = model.model_json_schema(mode="serialization")
    defs, fields = schema.get("$defs", {}), schema["properties"]
    types = {name: {"type": _one(fields[name], defs)["type"]} for name in told}
    return {"type": "object", "properties": types}


def _argument(node: dict[str, Any], defs: dict[str, Any], *, told: bool = False) -> dict[str, Any]:
    node = _one(node, defs)
    small: dict[str, Any] = {key: node[key] for key in _KEPT if key in node and not (told and key in _CHOICES)}
    if small.get("default", 0) in (None, ""):
        del small["default"]
    if "items" in small:
        small["items"] = _argument(small["items"], defs, told=told)
    return small


def _one(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """`node` without references and choices: of "one or a list of them" the list stands for both."""
    if "$ref" in node:
        return _one(defs[node["$ref"].rpartition("/")[2]], defs)
    choices = [c for c in node.get("anyOf", ()) if c != _NULL]
    if not choices:
        return node
    chosen = next((c for c in choices if c.get("type") == "array"), choices[0])
    return {**_one(chosen, defs), **{k: v for k, v in node.items() if k != "anyOf"}}
