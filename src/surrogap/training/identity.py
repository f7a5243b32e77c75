"""The identity of a run: the fields of its configuration that decide what is computed."""

# All other fields, which may change when a run is resumed. They change results by rounding only.
# (The number of processes changes them with scope "replica", but it is not a field.)
FREE = {
    *("out", "data_root", "download", "num_workers", "eval_batch_size", "device", "parallel"),
    *("compile", "capture", "channels_last", "max_skipped"),
    *("record_every", "eval_every", "eval_on", "checkpoint_every", "tensorboard"),
    *("sharpness_every", "sharpness_images"),
}
