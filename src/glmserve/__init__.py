# SPDX-License-Identifier: Apache-2.0
"""glmserve: GLM-5.2/5.3 on NVIDIA Triton Inference Server, with every GPU operator in Triton."""

__version__ = "0.1.0"
