"""Command-line options from settings dataclasses: a field is an option, its docstring the help.

So a flag is defined once, where it is used.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer


def parameters(
    settings: type[Any],
    *,
    without: Iterable[str] = (),
    optional: bool = False,
    heading: str | None = None,
    environment: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[inspect.Parameter]:
    """One keyword parameter per field that is not in `without`, in the help under `heading`.

    With `optional` every default is None, which means: not given; the help still tells the field's default. With
    `environment`, that and the field's name in capitals is a variable that gives the option's value; `variables` names
    those of single fields.
    """
    hints = get_type_hints(settings)
    helps = _field_docstrings(settings)
    result = []
    for field in fields(settings):
        if field.name in without:
            continue
        kind, text = _option_type(hints[field.name]), helps[field.name]
        default = None if field.default == () else field.default
        if optional:
            text += "" if default in (None, MISSING) else f" (default: {default})"
            kind, default = kind | None, None
        variable = (variables or {}).get(field.name) if environment is None else environment + field.name.upper()
        option = typer.Option(help=text, show_default=default is not None, rich_help_panel=heading, envvar=variable)
        annotation = Annotated[kind, option]  # type: ignore[valid-type]
        given = inspect.Parameter.empty if default is MISSING else default
        result.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=given)
        )
    return result


def request_parameters(options: type[Any], names: Iterable[str]) -> list[inspect.Parameter]:
    """One keyword parameter for each of the named keys of a TypedDict; None where it is not given."""
    hints, helps = get_type_hints(options), _field_docstrings(options)
    result = []
    for name in names:
        kind, text = _request_type(hints[name]), helps[name]
        if kind not in (int, float, bool):
            text += " As ID=VALUE;" if name == "logit_bias" else ""
            text += " repeat the option for several."
        annotation = Annotated[kind | None, typer.Option(help=text, show_default=False)]  # type: ignore[valid-type]
        result.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None))
    return result


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given, as the client library takes them. Raises BadParameter."""
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
    return given


def _bias(text: str) -> tuple[int, float]:
    try:
        token, value = text.split("=")
        return int(token), float(value)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not ID=VALUE", param_hint="--logit-bias") from None


def taken(options: dict[str, Any], settings: type[Any]) -> Any:
    """Takes the settings' own options out of all; the settings object. Raises what it raises."""
    own = [field.name for field in fields(settings) if field.name in options]
    return settings(**{name: options.pop(name) for name in own})


def with_parameters(function: Callable[..., None], options: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Gives a function of **options the signature that typer reads."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    unique = {parameter.name: parameter for parameter in [*own, *options]}
    function.__signature__ = inspect.Signature(list(unique.values()))  # type: ignore[attr-defined]
    function.__annotations__ = {name: parameter.annotation for name, parameter in unique.items()}
    return function


def settings_from(kind: type[Any], values: dict[str, Any]) -> Any:
    """The settings object of parsed options. A list option takes several values, or one with commas."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if hints[name] == tuple[str, ...]:
            values[name] = tuple(part.strip() for item in value or () for part in item.split(",") if part.strip())
    return kind(**values)


def _request_type(hint: Any) -> Any:
    if hint == Sequence[int]:
        return list[int]
    return hint if hint in (int, float, bool) else list[str]


def _option_type(hint: Any) -> Any:
    if hint == tuple[str, ...]:
        return list[str]
    if hint is Path:
        return str
    if NoneType in get_args(hint):
        return next(kind for kind in get_args(hint) if kind is not NoneType) | None
    return hint


def _field_docstrings(settings: type[Any]) -> dict[str, str]:
    """The string literal after each field: what a reader of the class sees, a caller of --help sees too."""
    module = ast.parse(inspect.getsource(sys.modules[settings.__module__]))
    (definition,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == settings.__name__)
    found: dict[str, str] = {}
    for base in settings.__bases__:
        found |= {} if base.__module__ == "builtins" else _field_docstrings(base)
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found
