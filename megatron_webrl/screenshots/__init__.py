"""The content-addressed screenshot store and its client."""

from megatron_webrl.screenshots.client import IMAGES_A_MESSAGE, ImagesMissing, fetch, fetch_images, upload
from megatron_webrl.screenshots.store import ScreenshotStore, StoreFull, serve_store

__all__ = [
    "IMAGES_A_MESSAGE",
    "ImagesMissing",
    "ScreenshotStore",
    "StoreFull",
    "fetch",
    "fetch_images",
    "serve_store",
    "upload",
]
