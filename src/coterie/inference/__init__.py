"""Use of trained models: loading, selection of the best, reference models of DPO, and chats."""
