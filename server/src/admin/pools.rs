//! `/pools`: what SDKs and tools read to find their way.

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use frontend::cluster::BucketShape;
use serde_json::{Value, json};
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
    let names = context.engine.list().into_iter().map(|bucket| {
        let spec = bucket.spec();
        json!({ "bucketName": spec.name, "uuid": format!("{:032x}", spec.uuid.0) })
    });
    Json(json!({
        "name": "default",
        "clusterName": "",
        "balanced": true,
        "rebalanceStatus": "none",
        "nodes": [this_node(&context)],
        "buckets": { "uri": "/pools/default/buckets" },
        "bucketNames": names.collect::<Vec<_>>(),
        "nodeServicesUri": "/pools/default/nodeServices",
    }))
}

/// This node, with every key that SDKs insist on: some end the whole process over a missing one.
pub(super) fn this_node(context: &Context) -> Value {
    json!({
        "hostname": format!("$HOST:{}", context.cluster.admin_port()),
        "otpNode": "ns_1@$HOST",
        "nodeUUID": context.node_uuid,
        "os": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        "version": crate::boot::VERSION,
        "status": "healthy",
        "clusterMembership": "active",
        "thisNode": true,
        "services": ["kv"],
        "ports": { "direct": context.cluster.kv_port() },
    })
}

/// The same document that GET_CLUSTER_CONFIG gives.
async fn terse(State(context): Shared, Path(bucket): Path<String>) -> Response {
    match context.engine.bucket(&bucket) {
        Some(bucket) => config(&context.cluster.bucket_config(&BucketShape::of(&bucket.spec())).1),
        None => (StatusCode::NOT_FOUND, "Requested resource not found.").into_response(),
    }
}

async fn node_services(State(context): Shared) -> Response {
    config(&context.cluster.global_config().1)
}

fn config(text: &str) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text.to_owned()).into_response()
}
