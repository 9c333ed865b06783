"""Use of trained models: loading, selecting the best, reference models of DPO, and chats."""
