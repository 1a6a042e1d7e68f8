"""Fine-tune a text classifier on TSV files with HuggingFace Accelerate.

Importing the package is cheap: nothing here imports torch.
"""

__version__ = "0.1.0"
