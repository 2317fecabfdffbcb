//! Who a client is: the users' file and the SASL exchanges that prove a name.

pub mod sasl;
pub mod scram;
pub(crate) mod trials;
pub mod users;

pub use sasl::Exchange;
pub use users::{Identity, Role, Users};
