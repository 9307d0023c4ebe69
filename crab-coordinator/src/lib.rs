//! The reverse proxy between agent and model that finds turn boundaries and holds the gate
