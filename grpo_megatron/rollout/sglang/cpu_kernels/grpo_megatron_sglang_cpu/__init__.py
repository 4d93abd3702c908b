"""What SGLang's engine needs on a machine without a GPU: kernels in torch, and a plug-in that connects them."""
