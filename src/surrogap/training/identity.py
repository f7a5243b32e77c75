"""The identity of a run: all fields of its configuration except those in `FREE`."""

# These may change when a run is resumed, since they change results only by rounding. (With scope
# "replica", the number of processes changes results, but it is not a field.)
FREE = {
    *("out", "data_root", "download", "num_workers", "eval_batch_size", "device", "parallel"),
    *("compile", "capture", "channels_last", "max_skipped"),
    *("record_every", "eval_every", "eval_on", "checkpoint_every", "tensorboard"),
    *("sharpness_every", "sharpness_images"),
}
