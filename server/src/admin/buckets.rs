//! `/pools/default/buckets`: bucket management as the SDKs' bucket managers call it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Form, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use engine::{Mailbox, OpResult, Ticket, Waiter};
use frontend::auth::{Identity, Role};
use persist::BucketSpec;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::{Context, Shared};

/// What a request that does not say gets.
#[derive(Clone, Copy)]
pub struct Defaults {
    pub vbuckets: u16,
    pub quota_bytes: u64,
}

pub fn routes() -> Router<Arc<Context>> {
    Router::new()
        .route("/pools/default/buckets", get(list).post(create))
        // Some SDKs end the collection's path with a slash.
        .route("/pools/default/buckets/", get(list).post(create))
        .route("/pools/default/buckets/{bucket}", get(show).delete(delete))
        .route("/pools/default/buckets/{bucket}/controller/doFlush", post(flush))
}

async fn list(State(context): Shared) -> Response {
    let buckets = context.engine.list();
    Json(buckets.iter().map(|bucket| describe(&context, bucket.spec())).collect::<Vec<_>>()).into_response()
}

async fn show(State(context): Shared, Path(name): Path<String>) -> Response {
    match context.engine.bucket(&name) {
        Some(bucket) => Json(describe(&context, bucket.spec())).into_response(),
        None => missing(),
    }
}

async fn create(
    State(context): Shared,
    Extension(who): Extension<Identity>,
    Form(form): Form<HashMap<String, String>>,
) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    let spec = match spec_of(&form, context.bucket_defaults) {
        Ok(spec) => spec,
        Err((field, why)) => return refused(field, &why),
    };
    if context.engine.bucket(&spec.name).is_some() {
        return refused("name", "Bucket with given name already exists");
    }
    match context.engine.create_bucket(spec) {
        Ok(_) => {
            context.cluster.changed();
            StatusCode::ACCEPTED.into_response()
        }
        Err(error) => refused("name", &error.to_string()),
    }
}

async fn delete(State(context): Shared, Extension(who): Extension<Identity>, Path(name): Path<String>) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    if context.engine.bucket(&name).is_none() {
        return missing();
    }
    match context.engine.delete_bucket(&name) {
        Ok(()) => {
            context.front.forget_bucket(&name);
            StatusCode::OK.into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn flush(State(context): Shared, Extension(who): Extension<Identity>, Path(name): Path<String>) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    let Some(bucket) = context.engine.bucket(&name) else { return missing() };
    if !bucket.spec().flush_enabled {
        let why = json!({ "_": "Flush is disabled for the bucket" });
        return (StatusCode::BAD_REQUEST, Json(why)).into_response();
    }
    let (send, receive) = oneshot::channel();
    let mailbox = Arc::new(Once(Mutex::new(Some(send))));
    bucket.flush(Waiter::new(mailbox, Ticket { slot: 0, generation: 0, request: 0 }));
    match receive.await {
        Ok(Ok(_)) => StatusCode::OK.into_response(),
        Ok(Err(error)) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// Brings one answer of the engine into the asynchronous world.
struct Once(Mutex<Option<oneshot::Sender<OpResult>>>);

impl Mailbox for Once {
    fn deliver(&self, _: Ticket, result: OpResult) {
        let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(sender) = sender {
            // The asker may have left.
            let _ = sender.send(result);
        }
    }
}

fn missing() -> Response {
    (StatusCode::NOT_FOUND, "Requested resource not found.").into_response()
}

fn forbidden() -> Response {
    (StatusCode::FORBIDDEN, "this needs an administrator").into_response()
}

fn refused(field: &str, why: &str) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({ "errors": { field: why } }))).into_response()
}

/// A bucket as the form asks for it; the error names the field.
fn spec_of(form: &HashMap<String, String>, defaults: Defaults) -> Result<BucketSpec, (&'static str, String)> {
    let number = |field: &'static str, default: u64, least: u64, most: u64| match form.get(field) {
        None => Ok(default),
        Some(text) => match text.parse() {
            Ok(n) if (least..=most).contains(&n) => Ok(n),
            _ => Err((field, format!("{text:?} is not a whole number from {least} to {most}"))),
        },
    };
    let name = form.get("name").filter(|name| crate::config::keys::is_bucket_name(name));
    let name = name.ok_or(("name", "1 to 100 of A-Z a-z 0-9 . % - _, not starting with a dot".to_owned()))?;
    let kind = form.get("bucketType").map_or("couchbase", String::as_str);
    if !["couchbase", "membase"].contains(&kind) {
        return Err(("bucketType", format!("{kind:?} buckets are not supported, only couchbase ones")));
    }
    let vbuckets = number("numVBuckets", u64::from(defaults.vbuckets), 1, 1024)?;
    if !vbuckets.is_power_of_two() {
        return Err(("numVBuckets", format!("{vbuckets} is not a power of two")));
    }
    let spec = BucketSpec {
        vbuckets: vbuckets as u16,
        replicas: number("replicaNumber", 0, 0, 2)? as u8,
        quota_bytes: number("ramQuotaMB", defaults.quota_bytes >> 20, 16, 1 << 24)? << 20,
        flush_enabled: form.get("flushEnabled").is_some_and(|v| v == "1" || v == "true"),
        eviction: match form.get("evictionPolicy").map(String::as_str) {
            None | Some("valueOnly") => persist::Eviction::Value,
            Some("fullEviction") => persist::Eviction::Full,
            Some(_) => return Err(("evictionPolicy", "is valueOnly or fullEviction".to_owned())),
        },
        ..crate::boot::new_bucket(name)
    };
    Ok(spec)
}

fn describe(context: &Context, spec: &BucketSpec) -> Value {
    let mut controllers = json!({});
    if spec.flush_enabled {
        controllers["flush"] = json!(format!("/pools/default/buckets/{}/controller/doFlush", spec.name));
    }
    json!({
        "name": spec.name,
        "uuid": format!("{:032x}", spec.uuid.0),
        "bucketType": "membase",
        "storageBackend": "couchstore",
        "evictionPolicy": "valueOnly",
        "conflictResolutionType": "seqno",
        "compressionMode": "passive",
        "durabilityMinLevel": "none",
        "maxTTL": 0,
        "replicaIndex": false,
        "replicaNumber": spec.replicas,
        "numVBuckets": spec.vbuckets,
        "quota": { "ram": spec.quota_bytes, "rawRAM": spec.quota_bytes },
        "controllers": controllers,
        "nodes": [{
            "hostname": format!("$HOST:{}", context.cluster.admin_port()),
            "status": "healthy",
            "version": crate::boot::VERSION,
            "services": ["kv"],
            "ports": { "direct": context.cluster.kv_port() },
        }],
    })
}
