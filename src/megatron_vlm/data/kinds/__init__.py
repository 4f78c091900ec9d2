"""The kinds of images, and which one a processor's are. A new kind is a file here and a line of KINDS."""

from pkgutil import resolve_name

from transformers import ProcessorMixin

from megatron_vlm.data.kinds.base import Kind, image_options

KINDS: list[type[Kind]] = [  # the first with its sign is taken
    resolve_name(f"{__name__}.{name}")
    for name in (
        "tiles:OneVisionTiles",
        "tiles:InternVLTiles",
        "squares:Squares",
        "slices:Sliced",
        "padded:Padded",
        "native:NaFlex",
        "native:Pooled",
        "native:Joined",
        "grid:QwenGrid",
        "grid:GLMGrid",
        "any_size:AnySize",
        "any_size:Unbroken",
        "one_size:Cropped",
        "one_size:OneSize",
    )
]
KNOWN = [names for kind in KINDS for names in kind.known]


def kind_of(processor: ProcessorMixin) -> Kind:
    """The kind of a processor's images: by the names of its classes, else by its settings."""
    images = processor.image_processor
    names = _names(processor)
    settings = dict(getattr(images, "size", None) or {})
    settings |= {kind.sign: value for kind in KINDS if (value := getattr(images, kind.sign, None))}
    by_class = [kind for kind in KINDS if names in kind.known]
    by_setting = [kind for kind in KINDS if settings.get(kind.sign)]
    return [*by_class, *by_setting, Kind][0](processor)


def why_unknown(processor: ProcessorMixin) -> str | None:
    """Why a processor must be called; None if its kind can do its work."""
    if image_options(processor):
        return "data.image_processor_kwargs are set"
    kind = kind_of(processor)
    names = _names(processor)
    parts = [processor.image_processor]
    if of_videos := kind.known.get(names):
        parts.append(processor.video_processor)
    classes = [type(part) for part in (processor, *parts)]
    # a subclass outside of transformers may have ways of its own
    are_theirs = all(cls.__module__.startswith("transformers.") for cls in classes)
    if names not in KNOWN or not are_theirs or of_videos not in (None, classes[-1].__name__):
        owners = ", ".join(dict.fromkeys(owner for owner, _ in KNOWN))
        class_names = " with ".join(cls.__name__ for cls in classes)
        return f"{class_names} is not one of the known processors ({owners})"
    for part in parts:
        if odd := kind.odd_settings(part):
            return f"{type(part).__name__} with {', '.join(odd)}"
    for key in kind.alike if of_videos else ():
        if (image_value := parts[0].to_dict()[key]) != (video_value := parts[1].to_dict()[key]):
            return f"{names[0]} with {key} = {image_value} for images and {video_value} for videos"
    return None


def _names(processor: ProcessorMixin) -> tuple[str, str]:
    return type(processor).__name__, type(processor.image_processor).__name__
