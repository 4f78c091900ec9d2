"""From a conversation to the tensors of a batch.

    ChatMLSample            messages, encoded images and videos, tools
      │ chat_template       rendered once: RenderedChat, a text and the spans of replies, images and videos
      │                     (`replies` finds replies in what templates without {% generation %} write)
      │ processing          images → pixels: (H, W, 3) uint8 decoded once, resized and cut as the tower wants
      │                     them; sizes → placeholders: a text with as many tokens as each image has. Of
      │                     processors that are not known here: one call of Hugging Face's own
      │                     tokenized once with offsets: EncodedText, input_ids (T,), loss weights (T,)
      ▼ encoder             cut to seq_length, never through an image; labels, positions
    HFEncoderTaskSample     input_ids, labels, loss_mask, attention_mask (T,); position_ids (T,) or (3, T);
      │                     visual_inputs: pixel_values (P, F) or (N, H, W, 3), image_grid_thw (N, 3), ...
      │ packing             which documents share a row of seq_length tokens (pure numpy)
      ▼                     Energon's task encoders: join documents to rows, pad and stack rows
    batch                   (B, S), see `megatron_vlm.batch`

`preencode_sample` stops before pixels: a packed row is chosen by the sizes in the headers of media alone.
A sample that cannot be trained on raises BadSample; `encoder` alone catches it, and counts the drop.
"""
