"""The heads of each layer: most models have the same in all layers, and attention in all."""

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """The heads of one layer. Without `values`, it takes its keys, before their norm, for values. With a
    `source`, a layer counted from 0, it makes neither and takes that layer's keys and values."""

    channels: int  # of a head
    groups: int  # key/value heads
    values: bool = True
    source: int | None = None

    @property
    def made(self) -> int:
        """How many heads of keys and of values its linear makes."""
        return 0 if self.source is not None else (1 + self.values) * self.groups


def heads_of(sizes: Any, layer: int) -> Heads:
    """The heads of `layer`, counted from 0 in the whole model. `sizes`: a LanguageModelConfig or a family's
    fields of it."""
    sizes = sizes if isinstance(sizes, dict) else vars(sizes)
    if layer_heads := sizes.get("layer_heads"):
        return layer_heads[layer]
    return Heads(sizes["kv_channels"], sizes["num_query_groups"])


def feed_forward_width(sizes: Any, layer: int) -> int:
    """The channels of the dense feed-forward of `layer`."""
    sizes = sizes if isinstance(sizes, dict) else vars(sizes)
    widths = sizes.get("layer_ffn")
    return widths[layer] if widths else sizes["ffn_hidden_size"]


class LatentHeads(NamedTuple):
    """The heads of a model with multi-head latent attention, in all layers (DeepSeek-V2, arXiv 2405.04434).

    Queries are made from `query_rank` channels, or from hidden states if that is None; keys and values from
    `rank` channels. A head's query and key have `plain` channels and then `turned` ones, which are turned by
    their position; the key's turned ones are the same for all heads.
    """

    query_rank: int | None
    rank: int
    plain: int
    turned: int
    value: int

    @property
    def scores(self) -> int:
        """The channels of a head's query and key."""
        return self.plain + self.turned

    def weights(self, width: int, number: int) -> int:
        """The weights of the linears of a layer of `width` with so many heads."""
        first = (self.query_rank or 0) + self.rank + self.turned
        queries = number * self.scores * (self.query_rank or width)
        keys_and_values = number * (self.plain + self.value) * self.rank
        return width * first + queries + keys_and_values + number * self.value * width

    @property
    def channels(self) -> int:
        """The channels of a head as kernels and caches take it: queries, keys and values of one width."""
        return max(self.scores, self.value)


RECURRENT = 0  # the window of a layer that attends to nothing: it has a gated delta net


class DeltaHeads(NamedTuple):
    """The heads of a model's gated delta nets."""

    keys: int  # heads of keys, and of queries
    values: int  # heads of values, as many for each of the keys'
    key_channels: int
    value_channels: int
    taps: int  # tokens that the convolution sees

    @property
    def convolved(self) -> int:
        """The channels of the convolution."""
        return 2 * self.keys * self.key_channels + self.values * self.value_channels

    @property
    def state(self) -> int:
        """The numbers of a layer's states."""
        return self.values * self.key_channels * self.value_channels


def is_recurrent(sizes: Any, layer: int) -> bool:
    """Whether `layer` has a gated delta net in the place of attention."""
    sizes = sizes if isinstance(sizes, dict) else vars(sizes)
    windows = sizes.get("layer_windows")
    return bool(windows) and windows[layer] == RECURRENT
