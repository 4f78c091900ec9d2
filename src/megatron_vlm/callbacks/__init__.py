"""Hooks of a training run; `Callback` is the class to write your own."""

from megatron_vlm.callbacks.base import Callback, Callbacks, Run, callback_class, check_methods

__all__ = ["Callback", "Callbacks", "Run", "callback_class", "check_methods"]
