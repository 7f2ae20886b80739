"""Functions read as tools: schemas that servers accept, descriptions, and what cannot be a tool."""

import enum
import functools
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pytest

from turngate.envs.tool_signature import read_docstring, read_signature


class Color(enum.Enum):
    red = "red"
    blue = "blue"


class Point(msgspec.Struct):
    x: int
    color: Color = Color.red


class Tree(msgspec.Struct):
    value: int
    children: "list[Tree]" = []


def spec_of(function: Any, **settings: Any) -> Any:
    return read_signature(function, **settings).spec


def test_a_function_becomes_a_definition():
    def search(query: Annotated[str, msgspec.Meta(description="words", min_length=1)], limit: int = 10) -> list[str]:
        """List titles.

        Only of the shelf.

        Args:
            query: not this one
            limit: how many,
                at most
        Returns:
            titles
        """
        return []

    spec = spec_of(search)
    assert (spec.name, spec.description) == ("search", "List titles.\n\nOnly of the shelf.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "words", "minLength": 1},
            "limit": {"type": "integer", "description": "how many, at most", "default": 10},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def test_a_function_without_parameters_takes_an_empty_object():
    def ping() -> None: ...

    schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    assert (spec_of(ping).description, spec_of(ping).parameters) == ("", schema)


def test_types_of_their_own_are_written_in_place():
    def draw(
        point: Annotated[Point, msgspec.Meta(description="where")],
        others: list[Point],
        way: Literal["up", "down"] = "up",
        color: Color | None = None,
    ) -> None: ...

    schema = spec_of(draw).parameters
    assert "$ref" not in json.dumps(schema)
    assert "$defs" not in schema
    assert schema["properties"]["point"]["description"] == "where"
    assert schema["properties"]["point"]["properties"]["color"]["enum"] == ["blue", "red"]
    assert schema["properties"]["others"]["items"]["properties"]["x"] == {"type": "integer"}
    assert schema["properties"]["way"] == {"enum": ["down", "up"], "default": "up"}
    assert schema["required"] == ["point", "others"]


def test_a_type_that_holds_itself_stays_a_definition_inside_the_parameters():
    def plant(tree: Tree, point: Point) -> None: ...

    schema = spec_of(plant).parameters
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert set(schema["$defs"]) == {"Tree"}
    assert "$ref" not in json.dumps(schema["properties"]["point"])


def test_defaults_that_json_cannot_carry_are_left_to_the_function():
    def f(a: Any = object(), b: list[int] = [1]) -> None: ...  # noqa: B006, B008

    schema = spec_of(f).parameters
    assert schema["properties"]["a"] == {}
    assert schema["properties"]["b"]["default"] == [1]
    assert read_signature(f).arguments().a is msgspec.UNSET


def test_a_method_leaves_out_the_instance():
    class Box:
        def put(self, a: int) -> None: ...

    assert read_signature(Box.put).takes_self
    bound = read_signature(Box().put)
    assert not bound.takes_self
    assert list(bound.spec.parameters["properties"]) == ["a"]


def test_partials_and_callable_objects_are_read_through():
    @dataclass
    class Adder:
        base: int

        def __call__(self, a: int, b: int = 1) -> int:
            """Add."""
            return self.base + a + b

    assert spec_of(Adder(1), name="adder").description == "Add."

    def add(a: int, b: int) -> int:
        """Sum."""
        return a + b

    partial = spec_of(functools.partial(add, b=3))
    assert (partial.name, partial.description) == ("add", "Sum.")
    assert partial.parameters["required"] == ["a"]


def untyped(a) -> None: ...
def starred(*a: int) -> None: ...
def named(**a: int) -> None: ...
def positional(a: int, /) -> None: ...
def odd(a: Any, b: object) -> None: ...
def missing(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (untyped, "must have types"),
        (starred, "by name: got a variadic positional"),
        (named, "by name: got a variadic keyword"),
        (positional, "by name: got a positional-only"),
        (odd, "JSON can carry"),
        (missing, "'Nowhere'"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_and_named(function, why):
    with pytest.raises(TypeError, match=why) as caught:
        read_signature(function)
    assert function.__name__ in str(caught.value)


def test_names_that_servers_refuse_are_refused():
    def f() -> None: ...

    for name in ("a b", "é", "x" * 65, "a.b"):
        with pytest.raises(ValueError, match="A-Z a-z 0-9"):
            read_signature(f, name=name)
    with pytest.raises(ValueError, match="pass name="):
        read_signature(lambda: None)
    assert spec_of(lambda: None, name="ok-1", description="d").description == "d"


def test_docstrings_of_several_styles_are_read():
    assert read_docstring("") == ("", {})
    assert read_docstring("One.\n\nTwo.") == ("One.\n\nTwo.", {})
    assert read_docstring("Do.\n\nArgs: a: first.\n    b (int): second.") == ("Do.", {"a": "first.", "b": "second."})
    assert read_docstring("Do.\nRaises: x\n") == ("Do.", {})
