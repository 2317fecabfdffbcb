//! `/pools/default/buckets/BUCKET/scopes`: collection management as SDKs call it. Every bucket has its default collection
//! and no other; the refusals carry the words by which SDKs tell one reason from another.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Form, Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};

use super::buckets::{missing, refused};
use super::{Context, Shared};

const DEFAULT: &str = "_default";

pub fn routes() -> Router<Arc<Context>> {
    Router::new()
        .route("/pools/default/buckets/{bucket}/scopes", get(manifest).post(create_scope))
        .route("/pools/default/buckets/{bucket}/scopes/", get(manifest).post(create_scope))
        .route("/pools/default/buckets/{bucket}/scopes/{scope}", delete(drop_scope))
        .route("/pools/default/buckets/{bucket}/scopes/{scope}/collections", post(create))
        .route("/pools/default/buckets/{bucket}/scopes/{scope}/collections/", post(create))
        .route("/pools/default/buckets/{bucket}/scopes/{scope}/collections/{collection}", delete(alter).patch(alter))
}

async fn manifest(State(context): Shared, Path(bucket): Path<String>) -> Response {
    let json = [(header::CONTENT_TYPE, "application/json")];
    in_bucket(&context, &bucket, || (json, frontend::MANIFEST).into_response())
}

async fn create_scope(
    State(context): Shared,
    Path(bucket): Path<String>,
    Form(form): Form<HashMap<String, String>>,
) -> Response {
    in_bucket(&context, &bucket, || match form.get("name").map(String::as_str) {
        Some(DEFAULT) => exists(&scope_named(DEFAULT)),
        _ => unsupported(),
    })
}

async fn drop_scope(State(context): Shared, Path((bucket, scope)): Path<(String, String)>) -> Response {
    in_bucket(&context, &bucket, || match scope.as_str() {
        DEFAULT => unsupported(),
        _ => absent(&scope_named(&scope)),
    })
}

async fn create(
    State(context): Shared,
    Path((bucket, scope)): Path<(String, String)>,
    Form(form): Form<HashMap<String, String>>,
) -> Response {
    in_bucket(&context, &bucket, || match form.get("name").map(String::as_str) {
        _ if scope != DEFAULT => absent(&scope_named(&scope)),
        Some(DEFAULT) => exists(&collection_named(DEFAULT, DEFAULT)),
        _ => unsupported(),
    })
}

/// Changes a collection or drops it.
async fn alter(State(context): Shared, Path((bucket, scope, collection)): Path<(String, String, String)>) -> Response {
    in_bucket(&context, &bucket, || match collection.as_str() {
        _ if scope != DEFAULT => absent(&scope_named(&scope)),
        DEFAULT => unsupported(),
        _ => absent(&collection_named(&collection, &scope)),
    })
}

fn in_bucket(context: &Context, bucket: &str, answer: impl FnOnce() -> Response) -> Response {
    if context.engine.bucket(bucket).is_some() { answer() } else { missing() }
}

fn scope_named(scope: &str) -> String {
    format!("Scope with name {scope:?}")
}

fn collection_named(collection: &str, scope: &str) -> String {
    format!("Collection with name {collection:?} in scope {scope:?}")
}

fn exists(what: &str) -> Response {
    refused("name", &format!("{what} already exists"))
}

fn absent(what: &str) -> Response {
    (StatusCode::NOT_FOUND, format!("{what} is not found")).into_response()
}

fn unsupported() -> Response {
    refused("_", "this server has the default collection only")
}
