"""Images and videos in prompts: decoding, preprocessing, and their places in steps.

- `image_reader.py` turns the images of a request into pixels in shared memory, in API processes.
- `image_sources.py` reads data URIs and files. `download.py` reads URLs.
- `processor.py` decodes an image, and says how many positions it takes.
- `videos.py` and `video_frames.py` turn a video into groups of frames.
- `placement.py` makes room for images among a prompt's tokens.
- `feature.py` decides which step encodes which part of an image.
- `hook.py` brings embeddings into steps.
- `image_encoder.py` runs the tower, and `preparation.py` computes its patches.
"""

from quire.features.spec import FeatureSpec

_HERE = "quire.features.images"

FEATURE = FeatureSpec(
    name="images",
    args=f"{_HERE}.args:ImageArgs",
    config=f"{_HERE}.model_settings:image_settings",
    needed=lambda config: config.images,
    loop=f"{_HERE}.feature:ImageFeature",
    hook=f"{_HERE}.hook:ImageHook",
    prompts=f"{_HERE}.image_reader:ImageReader",
    fields=f"{_HERE}.fields:FIELDS",
    stats=f"{_HERE}.stats:ImageStats",
    stats_name="images",
    live_rows=f"{_HERE}.metrics:LIVE_ROWS",
    metrics=f"{_HERE}.metrics:collect",
)
