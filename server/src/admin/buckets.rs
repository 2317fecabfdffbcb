//! `/pools/default/buckets`: bucket management as the SDKs' bucket managers call it.

use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Form, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use engine::{Mailbox, OpResult, Ticket, Waiter};
use frontend::auth::{Identity, Role};
use persist::{BucketSpec, Eviction, StoreError};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::bucket_form::{self, Fields, Wrong};
use super::{Context, Shared};

/// What a request that does not say gets.
#[derive(Clone, Copy)]
pub struct Defaults {
    pub vbuckets: u16,
    pub quota_bytes: u64,
    pub eviction: Eviction,
}

pub fn routes() -> Router<Arc<Context>> {
    Router::new()
        .route("/pools/default/buckets", get(list).post(create))
        // Some SDKs end the collection's path with a slash.
        .route("/pools/default/buckets/", get(list).post(create))
        .route("/pools/default/buckets/{bucket}", get(show).post(change).delete(delete))
        .route("/pools/default/buckets/{bucket}/controller/doFlush", post(flush))
}

async fn list(State(context): Shared) -> Response {
    let buckets = context.engine.list();
    Json(buckets.iter().map(|bucket| describe(&context, &bucket.spec())).collect::<Vec<_>>()).into_response()
}

async fn show(State(context): Shared, Path(name): Path<String>) -> Response {
    match context.engine.bucket(&name) {
        Some(bucket) => Json(describe(&context, &bucket.spec())).into_response(),
        None => missing(),
    }
}

async fn create(State(context): Shared, Extension(who): Extension<Identity>, Form(form): Form<Fields>) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    let spec = match asked_for(&form, context.bucket_defaults) {
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

fn asked_for(form: &Fields, defaults: Defaults) -> Result<BucketSpec, Wrong> {
    let Defaults { vbuckets, quota_bytes, eviction } = defaults;
    let base = BucketSpec { vbuckets, quota_bytes, eviction, ..crate::boot::new_bucket(bucket_form::name(form)?) };
    bucket_form::apply(form, base)
}

async fn change(
    State(context): Shared,
    Extension(who): Extension<Identity>,
    Path(name): Path<String>,
    Form(form): Form<Fields>,
) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    let Some(bucket) = context.engine.bucket(&name) else { return missing() };
    let spec = match bucket_form::change(&form, &bucket.spec()) {
        Ok(spec) => spec,
        Err((field, why)) => return refused(field, &why),
    };
    match context.engine.change_bucket(spec) {
        Ok(()) => StatusCode::OK.into_response(),
        Err(StoreError::NoSuchBucket(_)) => missing(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
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

pub(super) fn missing() -> Response {
    (StatusCode::NOT_FOUND, "Requested resource not found.").into_response()
}

pub(super) fn forbidden() -> Response {
    (StatusCode::FORBIDDEN, "this needs an administrator").into_response()
}

pub(super) fn refused(field: &str, why: &str) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({ "errors": { field: why } }))).into_response()
}

fn describe(context: &Context, spec: &BucketSpec) -> Value {
    let mut controllers = json!({});
    if spec.flush_enabled {
        controllers["flush"] = json!(format!("/pools/default/buckets/{}/controller/doFlush", spec.name));
    }
    let mut shown = bucket_form::describe(spec);
    shown["controllers"] = controllers;
    shown["nodes"] = json!([super::pools::this_node(context)]);
    shown
}
