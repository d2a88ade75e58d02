"""Directories of Hugging Face models: read, written, and started from."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.integration.huggingface.chat_template import ChatTemplate, read_chat_template
    from pcomm.integration.huggingface.directory import ModelDirectory, open_directory
    from pcomm.integration.huggingface.export import export_model
    from pcomm.integration.huggingface.loading import load_model
    from pcomm.integration.huggingface.model_config import DirectoryModel, read_model, write_config
    from pcomm.integration.huggingface.tokenizer import DirectoryTokenizer, read_tokenizer
    from pcomm.integration.huggingface.weights import load_weights

__all__ = [
    "ChatTemplate",
    "DirectoryModel",
    "DirectoryTokenizer",
    "ModelDirectory",
    "export_model",
    "load_model",
    "load_weights",
    "open_directory",
    "read_chat_template",
    "read_model",
    "read_tokenizer",
    "write_config",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "ChatTemplate": "chat_template",
        "DirectoryModel": "model_config",
        "DirectoryTokenizer": "tokenizer",
        "ModelDirectory": "directory",
        "export_model": "export",
        "read_chat_template": "chat_template",
        "read_tokenizer": "tokenizer",
        "load_model": "loading",
        "load_weights": "weights",
        "open_directory": "directory",
        "read_model": "model_config",
        "write_config": "model_config",
    },
)
