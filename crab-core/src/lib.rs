//! The words, types and traits of Crab: consistent savepoints for AI-agent sandboxes
