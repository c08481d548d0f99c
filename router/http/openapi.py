"""The OpenAPI document, and a page that shows it without a line of anybody else's code."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import pdserve
from router.http import responses
from router.http.operations import OPERATIONS, Operation
from router.validation import REQUEST_ID

_REF: Final = "#/components/schemas/{model}"
_DESCRIPTION: Final = "OpenAI-compatible API of pdserve. The same requests, typed, are served over gRPC."

_EVENT: Final[Mapping[str, Any]] = {
    "type": "object",
    "description": "One event of the stream.",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON, or at the end [DONE]."}},
}
_PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "asset": {"type": "string", "minLength": 1},
    "model_id": {"type": "string", "minLength": 1},
    "request_id": {"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"},
    "worker_id": {"type": "string", "minLength": 1},
}
"""Parts of paths, by name."""


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    bodies = [(op.body, "validation") for op in OPERATIONS if op.body is not None]
    answers = [(op.answer, "validation") for op in OPERATIONS if op.answer is not None]
    models: list[tuple[type[BaseModel], Any]] = [*bodies, *answers, (responses.Error, "validation")]
    refs, definitions = models_json_schema(models, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path.replace(":path}", "}"), {})[op.method.lower()] = _operation(op, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": pdserve.__version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def _operation(op: Operation, refs: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """`refs`: (model, "validation") -> reference to its schema."""
    content: dict[str, Any] = {}
    if op.answer is not None:
        content["application/json"] = {"schema": refs[op.answer, "validation"]}
    if op.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    if op.name == "openapi":
        content["application/json"] = {"schema": {"type": "object"}}
    if op.name == "metrics":
        content["text/plain"] = {"schema": {"type": "string"}}
    if op.name in ("docs", "dashboard"):
        content["text/html"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": refs[responses.Error, "validation"]}}
    result: dict[str, Any] = {
        "operationId": op.name,
        "summary": op.summary,
        "tags": [op.tag],
        "responses": {
            "200": {"description": "Done.", **({"content": content} if content else {})},
            **{str(status): {"description": "Refused or failed.", "content": error} for status in sorted(op.errors)},
        },
    }
    if op.streams and op.body is not None:
        result["responses"]["200"]["links"] = {
            one.name: {"operationId": one.name, "parameters": {"request_id": "$response.body#/id"}}
            for one in OPERATIONS
            if one.parameter == "request_id"
        }
    if op.name == "health":
        result["responses"]["503"] = {"description": "No usable workers, or stopping."}
    if op.body is not None:
        result["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[op.body, "validation"]}},
        }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}} for name, text in op.headers
    ]
    if op.parameter is not None:
        schema = _PARAMETERS[op.parameter]
        parameters.append({"name": op.parameter, "in": "path", "required": True, "schema": schema})
    if parameters:
        result["parameters"] = parameters
    return result


def docs_page(document: Mapping[str, Any]) -> str:
    """HTML for people: every operation with the fields of its body and of its answer."""
    schemas = document["components"]["schemas"]
    parts = []
    for path, methods in document["paths"].items():
        for method, op in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(op['summary'])}</p>"
            )
            body = op.get("requestBody", {}).get("content", {}).get("application/json")
            if body is not None:
                parts.append("<h3>Body</h3>" + _fields(body["schema"], schemas))
            answer = op["responses"]["200"].get("content", {}).get("application/json")
            if answer is not None and "$ref" in answer["schema"]:
                parts.append("<h3>Answer</h3>" + _fields(answer["schema"], schemas))
            codes = ", ".join(code for code in op["responses"] if code != "200")
            if codes:
                parts.append(f"<p>Errors: {codes}</p>")
    return _PAGE.format(version=html.escape(document["info"]["version"]), body="\n".join(parts))


def _fields(reference: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(path)}</code>{' *' if required else ''}</td>"
        f"<td><code>{html.escape(_type(field))}</code></td><td>{html.escape(field.get('description', ''))}</td></tr>"
        for path, field, required in _rows("", reference, schemas)
    )
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>"


def _rows(
    path: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Path, schema and whether it is needed, of every field at and below `path`; each path once."""
    seen = set()
    for variant in _variants(schema, schemas):
        if "items" in variant:
            yield from _rows(f"{path}[]", variant["items"], schemas)
        for name, field in variant.get("properties", {}).items():
            inner = f"{path}.{name}".removeprefix(".")
            if inner not in seen:
                seen.add(inner)
                yield inner, field, name in variant.get("required", ())
                yield from _rows(inner, field, schemas)


def _variants(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a value may be, with references followed."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _variants(one, schemas)
    else:
        yield schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_type(one) for one in field["anyOf"]))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field or "enum" in field:
        return " | ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"[{_type(field.get('items', {}))}]"
    bounds = [f"{sign} {field[key]:g}" for key, sign in _BOUNDS if key in field]
    kind = field.get("type", "any")
    return " ".join([kind if isinstance(kind, str) else " | ".join(kind), ", ".join(bounds)]).strip()


_BOUNDS: Final = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pdserve {version}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td, th {{ text-align: left; vertical-align: top; padding: 2px 12px 2px 0; }}
h2 {{ margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }}
pre {{ background: #f4f4f4; padding: 1rem; }}
</style></head><body>
<h1>pdserve {version}</h1>
<p>An OpenAI-compatible API; <a href="openapi.json">openapi.json</a> is this page for programs. Fields with * are
needed. Fields of OpenAI's API that are not listed are refused where they would change the answer, and else ignored.</p>
<pre>curl -N http://HOST:PORT/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64, "stream": true}}'</pre>
{body}
</body></html>
"""
