"""The identity of a run: the fields of its configuration that decide what is computed."""

# The others, which may change when a run is resumed. None changes the results beyond rounding. (The
# number of processes does, where each climbs along its own gradient, but it is not a field.)
FREE = {
    *("out", "data_root", "download", "num_workers", "eval_batch_size", "device", "parallel"),
    *("compile", "capture", "channels_last", "max_skipped"),
    *("record_every", "eval_every", "eval_on", "checkpoint_every", "tensorboard"),
    *("sharpness_every", "sharpness_images"),
}
