//! A last word to clients that speak another protocol. They are closed like all that is no frame, but people read what
//! they send, and a closed connection alone would leave them searching.

/// The text protocol's commands, and what HTTP begins with.
const MEMCACHED: &[&str] = &[
    "get ",
    "gets ",
    "gat ",
    "gats ",
    "set ",
    "add ",
    "replace ",
    "append ",
    "prepend ",
    "cas ",
    "incr ",
    "decr ",
    "delete ",
    "touch ",
    "stats",
    "version",
    "verbosity ",
    "flush_all",
    "mg ",
    "ms ",
    "mn\r",
    "quit",
    "watch ",
    "lru ",
    "slabs ",
];
const HTTP: &[&str] = &["GET /", "HEAD /", "POST /", "PUT /", "DELETE /"];

/// What to say before closing, if these bytes are the beginning of words we know.
pub(crate) fn refusal(received: &[u8], admin_port: u16) -> String {
    let begins = |words: &[&str]| words.iter().any(|word| received.starts_with(word.as_bytes()));
    if begins(MEMCACHED) {
        "SERVER_ERROR this port speaks the binary protocol only: switch your client to it\r\n".to_owned()
    } else if begins(HTTP) {
        let text = format!("This is the key-value port; HTTP is answered on port {admin_port}.\n");
        let len = text.len();
        format!(
            "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{text}"
        )
    } else {
        String::new()
    }
}
