"""The content-addressed screenshot store."""

from megatron_webrl.screenshots.store import ScreenshotStore, serve_store

__all__ = ["ScreenshotStore", "serve_store"]
