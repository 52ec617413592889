"""Images in prompts: decoding, preprocessing, and their places in steps."""

from quire.features.spec import FeatureSpec

# Nothing enables the feature until its parts of the loop and of the runner are here.
FEATURE = FeatureSpec(name="images", loop="quire.features.images.feature:open_images")
