"""The content-addressed screenshot store and its client."""

from megatron_webrl.screenshots.client import IMAGES_A_MESSAGE, ImagesMissing, fetch, fetch_images, upload
from megatron_webrl.screenshots.formats import image_file, image_size, is_jpeg, write_image
from megatron_webrl.screenshots.store import ScreenshotStore, StoreFull, serve_store

__all__ = [
    "IMAGES_A_MESSAGE",
    "ImagesMissing",
    "ScreenshotStore",
    "StoreFull",
    "fetch",
    "fetch_images",
    "image_file",
    "image_size",
    "is_jpeg",
    "serve_store",
    "upload",
    "write_image",
]
