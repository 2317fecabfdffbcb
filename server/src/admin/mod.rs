//! The admin port: HTTP for what SDKs, operators and scrapers ask beside the key-value protocol.
//!
//! It runs on one thread of its own, so that it answers when every worker is busy and when no connection slot is free: its connections have permits of their own. Health and
//! metrics only read numbers: a sick disk cannot make them wait.

mod bucket_form;
mod buckets;
mod collections;
mod pools;
mod port;
mod users;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use frontend::auth::Users;
use frontend::cluster::Cluster;
use limits::Ledger;
use tokio::sync::oneshot;

/// What the handlers need.
pub struct Context {
    pub engine: Arc<engine::Engine>,
    pub cluster: Arc<Cluster>,
    pub users: Arc<Users>,
    pub front: frontend::Handle,
    pub registry: Arc<metrics::Registry>,
    pub node_uuid: String,
    /// Whether the key-value port accepts clients.
    pub ready: AtomicBool,
    pub bucket_defaults: buckets::Defaults,
}

pub use buckets::Defaults;

type Shared = State<Arc<Context>>;

/// The running port; dropped or stopped, it answers no more.
pub struct Admin {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A bound port that does not answer yet: binding comes first, so that its number is known to those who announce it.
pub struct Listener(std::net::TcpListener);

impl Listener {
    pub fn bind(address: SocketAddr) -> std::io::Result<Listener> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Listener(listener))
    }

    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Starts to answer.
    pub fn serve(self, context: Arc<Context>, ledger: Arc<Ledger>) -> std::io::Result<Admin> {
        let address = self.address()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let app = router(context);
        let thread = std::thread::Builder::new().name("admin".to_owned()).spawn(move || {
            runtime.block_on(async {
                let listener = match tokio::net::TcpListener::from_std(self.0) {
                    Ok(listener) => listener,
                    Err(error) => return tracing::error!("the admin port stopped: {error}"),
                };
                // A stop does not wait for clients that keep their connection open.
                tokio::select! {
                    result = axum::serve(port::Port::new(listener, ledger), app).into_future() => {
                        if let Err(error) = result {
                            tracing::error!("the admin port stopped: {error}");
                        }
                    }
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Admin { address, stop: Some(stop), thread: Some(thread) })
    }
}

impl Admin {
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn router(context: Arc<Context>) -> Router {
    let guarded = Router::new()
        .merge(pools::routes())
        .merge(buckets::routes())
        .merge(collections::routes())
        .merge(users::routes())
        .route_layer(middleware::from_fn_with_state(Arc::clone(&context), authenticate));
    Router::new()
        .route("/", get(front_page))
        .route("/health/live", get(|| async { "alive\n" }))
        .route("/health/ready", get(ready))
        .route("/metrics", get(openmetrics))
        .merge(guarded)
        .fallback(async || (StatusCode::NOT_FOUND, "Requested resource not found."))
        .with_state(context)
}

async fn front_page() -> impl IntoResponse {
    let text = concat!(
        "Settee ",
        env!("CARGO_PKG_VERSION"),
        "\n\n/health/live /health/ready /metrics /whoami /pools /pools/default\n"
    );
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text)
}

/// A node with damaged data is ready, for whatever else it has; but it says so.
async fn ready(State(context): Shared) -> (StatusCode, String) {
    if !context.ready.load(Ordering::Acquire) {
        return (StatusCode::SERVICE_UNAVAILABLE, "not accepting clients\n".to_owned());
    }
    let mut text = "ready\n".to_owned();
    for bucket in context.engine.list() {
        for (vb, why) in bucket.unloadable() {
            text.push_str(&format!("bucket {}, vBucket {vb} could not be read whole: {why}\n", bucket.name()));
        }
    }
    (StatusCode::OK, text)
}

async fn openmetrics(State(context): Shared) -> impl IntoResponse {
    let mut text = String::new();
    metrics::write_openmetrics(&mut text, context.registry.families());
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text)
}

/// Lets proven users through and remembers who they are.
async fn authenticate(State(context): Shared, mut request: Request, next: Next) -> Response {
    match basic(request.headers()).and_then(|(user, password)| context.users.verify_plain(&user, password.as_bytes())) {
        Some(identity) => {
            request.extensions_mut().insert(identity);
            next.run(request).await
        }
        None => {
            let challenge = [(header::WWW_AUTHENTICATE, "Basic realm=\"Settee\"")];
            (StatusCode::UNAUTHORIZED, challenge, "wrong or missing user name and password\n").into_response()
        }
    }
}

fn basic(headers: &HeaderMap) -> Option<(String, String)> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = base64::engine::general_purpose::STANDARD.decode(encoded.trim()).ok()?;
    let (user, password) = std::str::from_utf8(&decoded).ok()?.split_once(':')?;
    Some((user.to_owned(), password.to_owned()))
}
