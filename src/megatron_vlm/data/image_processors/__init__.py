"""Specs of image processors. A new one is a class in a file here, and a line of SPECS."""

from pkgutil import resolve_name

from transformers import ProcessorMixin

from megatron_vlm.data.image_processors.base import ImageProcessorSpec, image_options

SPECS: list[type[ImageProcessorSpec]] = [  # the first with its marker is taken
    resolve_name(f"{__name__}.{name}")
    for name in (
        "tiles:OneVisionTiles",
        "tiles:InternVLTiles",
        "tiles:Squares",
        "tiles:Sliced",
        "grid:Padded",
        "grid:NaFlex",
        "grid:Pooled",
        "grid:Joined",
        "grid:QwenGrid",
        "grid:GLMGrid",
        "any_size:AnySize",
        "any_size:Unbroken",
        "base:Cropped",
        "base:OneSize",
    )
]
KNOWN_PROCESSORS = [names for spec in SPECS for names in spec.known_processors]


def get_image_spec(processor: ProcessorMixin) -> ImageProcessorSpec:
    """Return the spec of a processor's images: by the names of its classes, else by its settings."""
    images = processor.image_processor
    names = _names(processor)
    settings = dict(getattr(images, "size", None) or {})
    for spec in SPECS:
        if value := getattr(images, spec.marker_setting, None):
            settings[spec.marker_setting] = value
    by_class = [spec for spec in SPECS if names in spec.known_processors]
    by_setting = [spec for spec in SPECS if settings.get(spec.marker_setting)]
    return [*by_class, *by_setting, ImageProcessorSpec][0](processor)


def explain_unknown(processor: ProcessorMixin) -> str | None:
    """Return why a processor must be called; None if its spec can do its work."""
    if image_options(processor):
        return "data.image_processor_kwargs are set"
    spec = get_image_spec(processor)
    names = _names(processor)
    parts = [processor.image_processor]
    if of_videos := spec.known_processors.get(names):
        parts.append(processor.video_processor)
    classes = [type(part) for part in (processor, *parts)]
    # a subclass outside of transformers may have ways of its own
    are_theirs = all(cls.__module__.startswith("transformers.") for cls in classes)
    if names not in KNOWN_PROCESSORS or not are_theirs or of_videos not in (None, classes[-1].__name__):
        owners = ", ".join(dict.fromkeys(owner for owner, _ in KNOWN_PROCESSORS))
        class_names = " with ".join(cls.__name__ for cls in classes)
        return f"{class_names} is not one of the known processors ({owners})"
    for part in parts:
        if odd := spec.odd_settings(part):
            return f"{type(part).__name__} with {', '.join(odd)}"
    for key in spec.shared_settings if of_videos else ():
        if (image_value := parts[0].to_dict()[key]) != (video_value := parts[1].to_dict()[key]):
            return f"{names[0]} with {key} = {image_value} for images and {video_value} for videos"
    return None


def _names(processor: ProcessorMixin) -> tuple[str, str]:
    return type(processor).__name__, type(processor.image_processor).__name__
