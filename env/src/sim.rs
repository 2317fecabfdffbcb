//! The simulated environment.
