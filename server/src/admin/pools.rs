//! `/pools`: what SDKs and tools read to find their way.

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use frontend::cluster::BucketShape;
use serde_json::json;
use std::sync::Arc;

use super::{Context, Shared};

pub fn routes() -> Router<Arc<Context>> {
    Router::new()
        .route("/pools", get(pools))
        .route("/pools/default", get(pool))
        .route("/pools/default/b/{bucket}", get(terse))
        .route("/pools/default/nodeServices", get(node_services))
}

async fn pools(State(context): Shared) -> impl IntoResponse {
    Json(json!({
        "isAdminCreds": true,
        "implementationVersion": crate::boot::VERSION,
        "uuid": context.node_uuid,
        "pools": [{ "name": "default", "uri": "/pools/default" }],
    }))
}

async fn pool(State(context): Shared) -> impl IntoResponse {
    Json(json!({
        "name": "default",
        "nodes": [{
            "hostname": format!("$HOST:{}", context.cluster.admin_port()),
            "status": "healthy",
            "clusterMembership": "active",
            "version": crate::boot::VERSION,
            "services": ["kv"],
            "ports": { "direct": context.cluster.kv_port() },
            "thisNode": true,
        }],
        "buckets": { "uri": "/pools/default/buckets" },
        "nodeServicesUri": "/pools/default/nodeServices",
    }))
}

/// The same document that GET_CLUSTER_CONFIG gives.
async fn terse(State(context): Shared, Path(bucket): Path<String>) -> Response {
    match context.engine.bucket(&bucket) {
        Some(bucket) => config(&context.cluster.bucket_config(&BucketShape::of(bucket.spec())).1),
        None => (StatusCode::NOT_FOUND, "Requested resource not found.").into_response(),
    }
}

async fn node_services(State(context): Shared) -> Response {
    config(&context.cluster.global_config().1)
}

fn config(text: &str) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text.to_owned()).into_response()
}
