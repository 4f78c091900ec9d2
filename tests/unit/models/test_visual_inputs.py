import torch

from megatron_vlm.batch import GenericVisualInputs


def test_only_present_fields_reach_the_model():
    visual = GenericVisualInputs(pixel_values=torch.zeros(2, 3, 4, 4))
    assert list(visual.as_model_kwargs()) == ["pixel_values"]
    assert list(visual.normalized_for_model()) == ["pixel_values"]


def test_a_sample_axis_is_merged_into_the_item_axis():
    visual = GenericVisualInputs(
        pixel_values=torch.zeros(2, 3, 3, 4, 4),
        image_grid_thw=torch.zeros(2, 3, 3),
        image_sizes=torch.zeros(6, 2),
    )
    shapes = {name: tuple(value.shape) for name, value in visual.normalized_for_model().items()}
    assert shapes == {"pixel_values": (6, 3, 4, 4), "image_grid_thw": (6, 3), "image_sizes": (6, 2)}


def test_cat_keeps_order_and_pads_images_of_different_sizes():
    small = GenericVisualInputs(pixel_values=torch.ones(1, 3, 2, 4))
    wide = GenericVisualInputs(pixel_values=torch.full((1, 3, 2, 6), 2.0))
    pixels = GenericVisualInputs.cat([small, wide]).pixel_values
    assert pixels.shape == (2, 3, 2, 6)
    assert pixels[0, :, :, 4:].eq(0).all() and pixels[1].eq(2).all()


def test_grids_stay_on_the_host_when_pixels_move():
    visual = GenericVisualInputs(pixel_values=torch.zeros(4, 6), image_grid_thw=torch.tensor([[1, 2, 2]]))
    moved = visual.to("meta")
    assert (moved.pixel_values.device.type, moved.image_grid_thw.device.type) == ("meta", "cpu")
