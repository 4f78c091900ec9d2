"""A user's own function as a recipe: `--recipe my_recipe.py:receipts`, see docs/how-to/extend.md."""

import inspect
from dataclasses import is_dataclass
from typing import Any

from megatron_vlm.config import ConfigError, RunConfig, all_settings
from megatron_vlm.imports import calling, load_function
from megatron_vlm.messages import suggestion
from megatron_vlm.overrides import (
    ARGUMENT_OF_SETTING,
    SETTING_OF_ARGUMENT,
    apply_overrides,
    as_settings,
    fit_to_type,
)


class UsersRecipe:
    """The function of `FILE.py:NAME` or `package.module:NAME`, which returns a `RunConfig`.

    It gets the arguments that it takes, in the types of their settings; the others are set on what it
    returns. Parameters that are no argument of recipes are its own: `size=large` on a command line.
    """

    def __init__(self, name: str):
        self._name = name
        self._place = f"recipe {name}"
        self._function = load_function(self._place, name)
        with calling(self._place, name):
            parameters = inspect.signature(self._function, eval_str=True).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self._parameters = {p.name: p for p in parameters if p.kind not in variable}
        self.own_parameters = [key for key in self._parameters if key not in SETTING_OF_ARGUMENT]
        # what it takes as a parameter is the function's to decide, also on a command line
        self._decides = {SETTING_OF_ARGUMENT[key] for key in self._parameters if key in SETTING_OF_ARGUMENT}

    def __call__(self, **arguments: Any) -> RunConfig:
        """Return the run's configuration. Raises ConfigError on an unknown argument and on errors in it."""
        own_values = {key: arguments.pop(key) for key in self.own_parameters if key in arguments}
        settings = as_settings(arguments, self.own_parameters)
        values = all_settings(apply_overrides(RunConfig(), settings))
        passed = {
            name: values[key]
            for key, name in ARGUMENT_OF_SETTING.items()
            if key in settings and (self._takes_all or name in self._parameters)
        }
        passed |= {key: self._value(key, value) for key, value in own_values.items()}
        for key, parameter in self._parameters.items():
            if parameter.default is parameter.empty and key not in passed:
                raise ConfigError(f"{self._place}: it needs a value for {key}; give {key}=….")
        with calling(self._place, self._name):
            config = self._function(**passed)
        if not isinstance(config, RunConfig):
            raise ConfigError(f"{self._place} returned {type(config).__name__}; return a RunConfig.")
        for group in (config, *(value for value in vars(config).values() if is_dataclass(value))):
            for key in vars(group).keys() - group.__dataclass_fields__.keys():
                kind, hint = type(group).__name__, suggestion(key, group.__dataclass_fields__)
                raise ConfigError(f"{self._place}: sets {key}, which {kind} does not have{hint}")
        settings = {key: value for key, value in settings.items() if key not in self._decides}
        return apply_overrides(config, settings)

    def _value(self, key: str, value: Any) -> Any:
        """A value in the type of the parameter's annotation or, without one, of its default."""
        parameter = self._parameters[key]
        default = parameter.default
        kind = parameter.annotation
        if kind is parameter.empty:
            kind = Any if default is parameter.empty or default is None else type(default)
        try:
            return fit_to_type(value, kind)
        except ValueError as error:
            raise ConfigError(f"{self._place}: {key}: {error}") from error
