"""Every JSON file that is read is checked against a schema, and an error names the file and the field."""

import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

_T = TypeVar("_T")

#: A number of models: nobody merges a million of them, and a larger one is damage.
Count = Annotated[int, Field(ge=1, le=10**6)]


def read_json(path: Path, kind: type[_T], advice: str = "fetch it again") -> _T | None:
    """Return what a JSON file holds; None where there is no such file.

    Its content must be of a type such as ``dict[str, str]`` or a ``TypedDict``, or make a dataclass; further fields are
    allowed. Otherwise, a ValueError names the file and the field, and gives the advice.
    """
    try:
        return parse_json(path.read_bytes(), kind) if path.is_file() else None
    except OSError as error:
        raise ValueError(f"'{path}' can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged, {error}; {advice}") from error


def parse_json(text: bytes, kind: type[_T]) -> _T:
    """Return what a JSON text holds, or raise a ValueError that says what is wrong, and where."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    return checked(content, kind)


def checked(content: Any, kind: type[_T]) -> _T:
    """Return a content from JSON or YAML unchanged if it is of a type, or the dataclass that it makes.

    Otherwise, a ValueError names the first field that is missing or of another type.
    """
    try:
        adapter = TypeAdapter(kind)
        if not is_dataclass(kind):
            adapter.validate_python(content, strict=True)
            return cast("_T", content)
        return adapter.validate_json(json.dumps(content), strict=True)  # strict Python would want a dataclass already
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        got = repr(first["input"])
        what = f"{first['msg'][0].lower()}{first['msg'][1:]}, got {got if len(got) <= 60 else f'{got[:57]}...'}"
        raise ValueError(f"field '{'.'.join(map(str, first['loc']))}': {what}" if first["loc"] else what) from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None
